"""`specdec generate`: one prompt in, its continuation on stdout as it is written, statistics on stderr."""

import json
import sys
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from specdec.cli.drafts_view import draft_spans, render_drafts
from specdec.config import SpeculativeConfig
from specdec.llm import LLM
from specdec.requests.output import CompletionOutput, RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.stats import RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The command line as given. sampling and engine: arguments of SamplingParams and LLM."""

    target: str
    prompt: str | None
    prompt_file: Path | None
    draft: str | None
    num_speculative_tokens: int | None
    sampling: Mapping[str, object]
    engine: Mapping[str, object]
    acceptance: str
    json: bool
    show_drafts: bool


def run_generate(options: GenerateOptions) -> None:
    """Load, generate, print."""
    prompt = read_prompt(options)
    params = sampling_params(options.sampling)
    if options.show_drafts and params.n > 1:
        raise ValueError(
            f"--show-drafts with -n {params.n}: it shows the rounds of one sample; leave one of them out"
        )
    if params.logprobs is not None and not options.json:
        raise ValueError(
            f"--logprobs {params.logprobs} without --json: text has no place for them; give --json too"
        )
    llm = LLM(
        options.target,
        speculation_of(options.draft, options.num_speculative_tokens, options.acceptance),
        **options.engine,
    )
    print(headline(llm), file=sys.stderr)
    if options.json:
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        print(json.dumps(as_json(llm, output, options.show_drafts)))
    else:
        output = _write_text(llm, prompt, params, options.show_drafts)
    leave_on_error(output)


def _write_text(llm: LLM, prompt: str, params: SamplingParams, show_drafts: bool) -> RequestOutput:
    if not show_drafts:
        _echo_prompt(prompt)
    output = _write(llm, prompt, params, show_drafts)
    if output.seed is not None:
        print(f"seed {output.seed}", file=sys.stderr)
    print(stats_line(output.stats), file=sys.stderr)
    return output


def leave_on_error(output: RequestOutput) -> None:
    """Exit code 2 where a sample could not be written to its end, however much of it there is."""
    errors = [
        completion.stop_reason
        for completion in output.outputs
        if completion.finish_reason == "error"
    ]
    for error in errors:
        print(f"specdec: error: {error}", file=sys.stderr)
    if errors:
        raise SystemExit(2)


def _write(llm: LLM, prompt: str, params: SamplingParams, show_drafts: bool) -> RequestOutput:
    """One sample as its rounds commit; several samples, or rounds with their drafts, when all is there."""
    if params.n == 1 and not show_drafts:
        return _write_pieces(llm.stream(prompt, params))
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    if show_drafts:
        console = Console(highlight=False, soft_wrap=True)
        render_drafts(
            console, draft_spans(output, llm.tokenizer), prompt if console.is_terminal else None
        )
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


def read_prompt(options: GenerateOptions) -> str:
    """The prompt from the one place that has it; the line break that ends a file is not part of it."""
    if options.prompt is not None and options.prompt_file is not None:
        raise ValueError("a prompt and --prompt-file: give one of them")
    if options.prompt is not None:
        return options.prompt
    if options.prompt_file is not None:
        return read_text("--prompt-file", options.prompt_file).removesuffix("\n")
    if sys.stdin is None or sys.stdin.isatty():  # None: closed by who called
        raise ValueError(
            "no prompt: give it as an argument, with --prompt-file, or on standard input"
        )
    return sys.stdin.read().removesuffix("\n")


def read_text(option: str, file: Path) -> str:
    """A file that an option names."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file}: no text in UTF-8: {error}") from error


def sampling_params(sampling: Mapping[str, object]) -> SamplingParams:
    """The parameters that were given, None is none; those that a greedy choice would not read are refused."""
    given = {name: value for name, value in sampling.items() if value is not None}
    for name in ("top_p", "top_k", "min_p"):
        if name in given and given["temperature"] == 0:
            option = f"--{name.replace('_', '-')} {given[name]}"
            raise ValueError(
                f"{option} with --temperature 0, which takes the best token: give --temperature too"
            )
    return SamplingParams(**given)


def speculation_of(
    draft: str | None, num_speculative_tokens: int | None, acceptance: str
) -> SpeculativeConfig | None:
    """The options of a draft; those that need one are refused without it."""
    if draft is None:
        if num_speculative_tokens:
            raise ValueError(
                f"--num-speculative-tokens {num_speculative_tokens} without a draft: give --draft too"
            )
        if acceptance != "exact":
            raise ValueError(f"--acceptance {acceptance} without a draft: give --draft too")
        return None
    if num_speculative_tokens is None:
        return SpeculativeConfig(draft, acceptance=acceptance)
    return SpeculativeConfig(draft, num_speculative_tokens, acceptance=acceptance)


def headline(llm: LLM) -> str:
    """What was loaded and how it runs, in one line."""
    hidden = llm.engine.runner.buffers.hidden_states
    target = f"target {llm.target_report.format}, {str(hidden.dtype).removeprefix('torch.')} on {hidden.device}"
    if llm.draft_report is None:
        return f"{target}; no draft"
    return f"{target}; draft {llm.draft_report.format}, K = {llm.sizes.num_speculative_tokens}"


def _echo_prompt(prompt: str) -> None:
    """On a terminal the text reads on from its prompt; a pipe gets the text alone."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_terminal and sys.stdout.isatty():
        console.print(Text(prompt, style="dim"), end="")


def stats_line(stats: RequestStats) -> str:
    """Tokens, acceptance, speed. "at least 1..K" are the rates per position of USE: rounds that accepted so many."""
    parts = [f"{stats.num_generated_tokens} tokens in {stats.num_rounds} rounds"]
    if stats.num_drafted_tokens:
        rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_position)
        parts += [
            f"acceptance length {stats.mean_acceptance_length:.2f}",
            f"accepted per position {rates}",
        ]
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.time_to_first_token is not None:
        parts.append(f"first token after {1e3 * stats.time_to_first_token:.0f} ms")
    return " | ".join(parts)


def as_json(llm: LLM, output: RequestOutput, has_rounds: bool) -> dict[str, object]:
    """Everything that a program may want of one output."""
    hidden = llm.engine.runner.buffers.hidden_states
    result = _sample_as_json(output.outputs[0]) | {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "target": str(llm.target_report.directory),
        "draft": None if llm.draft_report is None else str(llm.draft_report.directory),
        "num_speculative_tokens": llm.sizes.num_speculative_tokens,
        "acceptance": llm.engine.runner.acceptance,
        "seed": output.seed,
        "dtype": str(hidden.dtype).removeprefix("torch."),
        "device": str(hidden.device),
        "stats": output.stats.as_dict(),
    }
    if len(output.outputs) > 1:
        result["samples"] = [_sample_as_json(sample) for sample in output.outputs]
    return result | (
        {"rounds": [asdict(record) for record in output.stats.rounds]} if has_rounds else {}
    )


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
