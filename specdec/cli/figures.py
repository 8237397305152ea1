"""What a command says of an engine and of an output: in lines of at most 60 columns, or as JSON."""

import shlex
import sys
import textwrap
from collections import Counter

import specdec
from specdec.cli.choices import ChatOptions, GenerateOptions
from specdec.requests.output import CompletionOutput, RequestOutput
from weights.errors import shown

COLUMNS = 60
SEPARATOR = " | "
LONGEST_STOP = 40  # characters shown of a stop string
# a draft that works reaches 1.1 at its worst; fewer rounds than this say little
LEAST_LENGTH = 1.1
LEAST_ROUNDS = 16


def say_what_runs(llm: "specdec.LLM") -> None:
    """Say in a line what was loaded and how it runs, and choose the number of threads."""
    # the engine has imported torch by now
    from specdec.cli.threads import choose_threads

    dtype, device = _dtype_and_device(llm)
    line = f"target {llm.target_report.format}, {dtype} on {device}"
    drafts = "no draft" if llm.draft_report is None else f"draft {llm.draft_report.format}"
    print(f"{line}; {drafts}{_how_drafts_are_made(llm)}", file=sys.stderr)
    choose_threads(llm.engine.runner)


def _how_drafts_are_made(llm: "specdec.LLM") -> str:
    K, tree = llm.sizes.num_speculative_tokens, llm.sizes.tree
    if llm.draft_report is None:
        return ""
    drafts = f"as many drafts as pay, at most {K}" if llm.sizes.is_adaptive else f"K = {K}"
    if llm.sizes.has_both:
        drafts += ", chains or trees"
    elif tree is not None:
        drafts = f"trees of {tree.num_nodes} nodes, top_k = {tree.top_k}, {K} levels"
    threshold = llm.engine.runner.confidence_threshold
    return f", {drafts}, stopping below {threshold:g}" if threshold else f", {drafts}"


def _dtype_and_device(llm: "specdec.LLM") -> tuple[str, str]:
    states = llm.engine.runner.buffers.hidden_states
    return str(states.dtype).removeprefix("torch."), str(states.device)


def note_seed(seed: object, temperature: float) -> None:
    """Say that greedy decoding draws nothing; scripts written for vLLM give a seed anyway."""
    if seed is not None and temperature == 0:
        print("seed has no effect at temperature 0", file=sys.stderr)


def report(
    output: RequestOutput, options: GenerateOptions | ChatOptions, has_figures: bool = True
) -> bool:
    """Print seed, figures, what to do about a useless draft, and errors; True: there were some."""
    if has_figures:
        if output.seed is not None and options.sampling.temperature > 0:
            print(f"seed {output.seed}", file=sys.stderr)
        print(figures(output), file=sys.stderr)
    draft = None if options.speculation is None else str(options.speculation.model)
    advice = warning(output, options.target, draft)
    if advice is not None:
        print(advice, file=sys.stderr)
    failed = [each.stop_reason for each in output.outputs if each.finish_reason == "error"]
    for reason in failed:
        print(f"specdec: error: {options.wording.text(str(reason))}", file=sys.stderr)
    return bool(failed)


def figures(output: RequestOutput) -> str:
    """Say how many tokens there are, why the text ended, what was accepted, and how fast.

    The rate at position i: the share of rounds that accepted at least i drafts.
    """
    stats = output.stats
    parts = [f"{stats.num_generated_tokens} tokens in {stats.num_rounds} rounds"]
    parts.append(_endings(output) if output.finished else "interrupted")
    if stats.num_drafted_tokens:
        rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_position)
        parts.append(f"acceptance length {stats.mean_acceptance_length:.2f}")
        parts.append(f"accepted per position {rates}")
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.time_to_first_token is not None:
        parts.append(f"first token after {1e3 * stats.time_to_first_token:.0f} ms")
    return "\n".join(lines([part for part in parts if part]))


def _endings(output: RequestOutput) -> str:
    """Name each reason once with its count: "length (2), stop: '\\n'"."""
    counts = Counter[str]()
    for each in output.outputs:
        has_stop = each.finish_reason == "stop" and each.stop_reason is not None
        stop = f": {shown(repr(each.stop_reason), LONGEST_STOP)}" if has_stop else ""
        counts[f"{each.finish_reason}{stop}"] += each.finish_reason is not None
    return ", ".join(name if n == 1 else f"{name} ({n})" for name, n in counts.items() if n)


def lines(parts: list[str]) -> list[str]:
    """Join the parts with bars; break at a bar, or within a part that is too long by itself."""
    found: list[str] = []
    for part in parts:
        joined = f"{found[-1]}{SEPARATOR}{part}" if found else part
        if len(joined) <= COLUMNS:
            found[-1:] = [joined]
        else:
            found += textwrap.wrap(part, COLUMNS)
    return found


def warning(output: RequestOutput, target: str, draft: str | None) -> str | None:
    """Say what to run where hardly any draft was accepted."""
    stats = output.stats
    length = stats.mean_acceptance_length
    if draft is None or not stats.num_drafted_tokens or length is None:
        return None
    if stats.num_rounds < LEAST_ROUNDS or length >= LEAST_LENGTH:
        return None
    command = shlex.join(["specdec", "verify", target, draft])
    return f"warning: hardly any draft is accepted; to find out why:\n{command}"


def as_json(llm: "specdec.LLM", output: RequestOutput, has_rounds: bool) -> dict[str, object]:
    """Return all that a program may need from one output."""
    sizes = llm.sizes
    dtype, device = _dtype_and_device(llm)
    top_k = 1 if sizes.tree is None else sizes.tree.top_k
    result = _sample_as_json(output.outputs[0]) | {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "target": str(llm.target_report.directory),
        "draft": None if llm.draft_report is None else str(llm.draft_report.directory),
        "num_speculative_tokens": sizes.num_speculative_tokens,
        "draft_top_k": None if sizes.has_both else top_k,  # None: chains or trees, as it pays
        "num_draft_tokens": sizes.num_draft_tokens,
        "draft_confidence_threshold": llm.engine.runner.confidence_threshold,
        "acceptance": llm.engine.runner.acceptance,
        "seed": output.seed,
        "dtype": dtype,
        "device": device,
        "stats": output.stats.as_dict(),
    }
    if len(output.outputs) > 1:
        result["samples"] = [_sample_as_json(sample) for sample in output.outputs]
    if has_rounds:  # a round without a tree has no parents
        records = [record._asdict() for record in output.stats.rounds]
        result["rounds"] = [
            {name: value for name, value in record.items() if name != "parents" or value}
            for record in records
        ]
    return result


def _sample_as_json(completion: CompletionOutput) -> dict[str, object]:
    names = ("text", "token_ids", "finish_reason", "stop_reason")
    result: dict[str, object] = {name: getattr(completion, name) for name in names}
    rows = completion.logprobs
    if rows is not None:
        tokens = [{str(i): found._asdict() for i, found in row.items()} for row in rows]
        result |= {"logprobs": tokens, "cumulative_logprob": completion.cumulative_logprob}
    return result
