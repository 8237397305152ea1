"""`specdec generate`: the continuation of a prompt on stdout, statistics on stderr."""

import json
import sys
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text
from torch import Tensor

from specdec.arguments import from_mapping
from specdec.cli.drafts_view import draft_spans, render_drafts
from specdec.config import SpeculativeConfig
from specdec.llm import LLM
from specdec.requests.output import CompletionOutput, RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.stats import RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What `generate` and `chat` share. sampling, engine: arguments of SamplingParams and LLM."""

    target: str
    draft: str | None
    num_speculative_tokens: int | None
    acceptance: str
    sampling: Mapping[str, object]
    engine: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(TextOptions):
    """prompt_text: of --prompt-file."""

    prompt: str | None
    prompt_text: str | None
    json: bool
    show_drafts: bool


def run_generate(options: GenerateOptions) -> None:
    """Load, generate, print."""
    prompt = read_prompt(options)
    params = sampling_params(options.sampling)
    if options.show_drafts and params.n > 1:
        raise ValueError(
            f"--show-drafts with -n {params.n}: it shows the rounds of one sample; leave one out"
        )
    if params.logprobs is not None and not options.json:
        raise ValueError(
            f"--logprobs {params.logprobs} without --json: text has no place for them; give --json"
        )
    max_num_seqs = min(params.n, 64)
    llm = LLM(options.target, speculation_of(options), max_num_seqs=max_num_seqs, **options.engine)
    print(headline(llm), file=sys.stderr)
    if options.json:
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        print(json.dumps(as_json(llm, output, options.show_drafts)))
    else:
        output = _write_text(llm, prompt, params, options.show_drafts)
    leave_on_error(output)


def read_prompt(options: GenerateOptions) -> str:
    """The prompt, from one place. The line break that ends a file is not part of it."""
    if options.prompt is not None and options.prompt_text is not None:
        raise ValueError("a prompt and --prompt-file: give one of them")
    if options.prompt is not None:
        return options.prompt
    text = options.prompt_text
    if text is None:
        if sys.stdin is None or sys.stdin.isatty():  # None: the caller closed it
            raise ValueError(
                "no prompt: give it as an argument, with --prompt-file, or on standard input"
            )
        text = sys.stdin.read()
    return text.removesuffix("\n")


def sampling_params(sampling: Mapping[str, object]) -> SamplingParams:
    """The parameters that were given, without None. Refuse those that greedy decoding ignores."""
    given = {name: value for name, value in sampling.items() if value is not None}
    for name in ("top_p", "top_k", "min_p"):
        if name in given and given["temperature"] == 0:
            option = f"--{name.replace('_', '-')} {given[name]}"
            raise ValueError(
                f"{option} with --temperature 0, which takes the best token: give --temperature too"
            )
    return from_mapping(SamplingParams, given)


def speculation_of(options: TextOptions) -> SpeculativeConfig | None:
    """The options of the draft. Without a draft, refuse those that need one."""
    K = options.num_speculative_tokens
    acceptance = options.acceptance
    if options.draft is not None:
        return SpeculativeConfig(options.draft, 3 if K is None else K, acceptance=acceptance)
    if K:
        raise ValueError(f"--num-speculative-tokens {K} without a draft: give --draft too")
    if acceptance != "exact":
        raise ValueError(f"--acceptance {acceptance} without a draft: give --draft too")
    return None


def headline(llm: LLM) -> str:
    """What was loaded and how it runs, in one line."""
    target = f"target {llm.target_report.format}, {_dtype(llm)} on {_hidden(llm).device}"
    if llm.draft_report is None:
        return f"{target}; no draft"
    return f"{target}; draft {llm.draft_report.format}, K = {llm.sizes.num_speculative_tokens}"


def _hidden(llm: LLM) -> Tensor:
    return llm.engine.runner.buffers.hidden_states


def _dtype(llm: LLM) -> str:
    return str(_hidden(llm).dtype).removeprefix("torch.")


def _write_text(llm: LLM, prompt: str, params: SamplingParams, show_drafts: bool) -> RequestOutput:
    if not show_drafts:
        _echo_prompt(prompt)
    output = _write(llm, prompt, params, show_drafts)
    if output.seed is not None:
        print(f"seed {output.seed}", file=sys.stderr)
    print(stats_line(output.stats), file=sys.stderr)
    return output


def _echo_prompt(prompt: str) -> None:
    """On a terminal the prompt precedes its continuation; a pipe gets the text alone."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_terminal and sys.stdout.isatty():
        console.print(Text(prompt, style="dim"), end="")


def _write(llm: LLM, prompt: str, params: SamplingParams, show_drafts: bool) -> RequestOutput:
    """One sample as its rounds commit; several samples, or drafts, once all are finished."""
    if params.n == 1 and not show_drafts:
        return _write_pieces(llm.stream(prompt, params))
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    if show_drafts:
        console = Console(highlight=False, soft_wrap=True)
        spans = draft_spans(output, llm.tokenizer)
        render_drafts(console, spans, prompt if console.is_terminal else None)
    else:
        for number, completion in enumerate(output.outputs, start=1):
            print(f"--- sample {number} of {params.n} ---\n{completion.text}")
    return output


def _write_pieces(pieces: Generator[CompletionOutput, None, RequestOutput]) -> RequestOutput:
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            output: RequestOutput = end.value
            print()
            return output
        print(piece.text, end="", flush=True)


def stats_line(stats: RequestStats) -> str:
    """Tokens, acceptance, speed. The rate at position i: rounds that accepted at least i drafts."""
    parts = [f"{stats.num_generated_tokens} tokens in {stats.num_rounds} rounds"]
    if stats.num_drafted_tokens:
        rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_position)
        parts.append(f"acceptance length {stats.mean_acceptance_length:.2f}")
        parts.append(f"accepted per position {rates}")
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.time_to_first_token is not None:
        parts.append(f"first token after {1e3 * stats.time_to_first_token:.0f} ms")
    return " | ".join(parts)


def as_json(llm: LLM, output: RequestOutput, has_rounds: bool) -> dict[str, object]:
    """Everything that a program may need of one output."""
    result = _sample_as_json(output.outputs[0]) | {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "target": str(llm.target_report.directory),
        "draft": None if llm.draft_report is None else str(llm.draft_report.directory),
        "num_speculative_tokens": llm.sizes.num_speculative_tokens,
        "acceptance": llm.engine.runner.acceptance,
        "seed": output.seed,
        "dtype": _dtype(llm),
        "device": str(_hidden(llm).device),
        "stats": output.stats.as_dict(),
    }
    if len(output.outputs) > 1:
        result["samples"] = [_sample_as_json(sample) for sample in output.outputs]
    if has_rounds:
        result["rounds"] = [asdict(record) for record in output.stats.rounds]
    return result


def _sample_as_json(completion: CompletionOutput) -> dict[str, object]:
    result: dict[str, object] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        tokens = [
            {str(i): found._asdict() for i, found in row.items()} for row in completion.logprobs
        ]
        result |= {"logprobs": tokens, "cumulative_logprob": completion.cumulative_logprob}
    return result


def leave_on_error(output: RequestOutput) -> None:
    """Exit code 2 if a sample ended in an error, whatever part of it was written."""
    endings = [each for each in output.outputs if each.finish_reason == "error"]
    for ending in endings:
        print(f"specdec: error: {ending.stop_reason}", file=sys.stderr)
    if endings:
        raise SystemExit(2)
