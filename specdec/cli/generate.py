"""`specdec generate`: write the continuation of a prompt to stdout, statistics to stderr."""

import json
import os
import sys
from dataclasses import asdict
from typing import Literal

from rich.console import Console
from rich.text import Text

import specdec
from specdec.arguments import from_mapping
from specdec.cli.as_json import as_json
from specdec.cli.before_torch import check_models
from specdec.cli.choices import GenerateOptions, Sampling
from specdec.cli.drafts_view import DraftsView
from specdec.cli.figures import figures, warning
from specdec.cli.headline import say_what_runs
from specdec.cli.readers import STANDARD_INPUT, read_input
from specdec.cli.speculation import draft_of, refuse_greedy
from specdec.cli.wording import Wording
from specdec.cli.writers import DraftsWriter, NoWriter, TextWriter, Writer
from specdec.options import EngineOptions
from specdec.requests.intake import NewRequest
from specdec.requests.output import RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.pieces import whole_output
from specdec.requests.request import Request


def run_generate(options: GenerateOptions) -> None:
    """Load, generate, print."""
    params = sampling_params(options.sampling)
    refuse_greedy(options.speculation, params.temperature)
    _check_output(options, params)
    prompt = read_prompt(options)
    engine: EngineOptions = {"max_num_seqs": min(params.n, 64), **options.engine}
    check_models(options.target, draft_of(options.speculation), engine)
    llm = specdec.LLM(options.target, speculative_config=options.speculation, **engine)
    say_what_runs(llm)
    note_seed(options.sampling.seed, params.temperature)
    output = _write(llm, prompt, params, options)
    advice = warning(output, options.target, draft_of(options.speculation))
    if advice is not None:
        print(advice, file=sys.stderr)
    leave_on_error(output, options.wording)


def _check_output(options: GenerateOptions, params: SamplingParams) -> None:
    if options.show_drafts and params.n > 1:
        raise ValueError(
            f"--show-drafts with -n {params.n}: it shows the rounds of one sample; leave one out"
        )
    if options.show_drafts and options.speculation is None:
        raise ValueError("--show-drafts without a draft: give --draft too")
    if params.logprobs is not None and not options.json:
        raise ValueError(
            f"--logprobs {params.logprobs} without --json: text has no place for them; give --json"
        )


def read_prompt(options: GenerateOptions) -> str:
    """Read the prompt from one place. The line break that ends a file is not part of it."""
    if options.prompt is not None and options.prompt_text is not None:
        raise ValueError("a prompt and --prompt-file: give one of them")
    if options.prompt is not None and options.prompt != STANDARD_INPUT:
        return options.prompt
    if options.prompt_text is not None:
        return options.prompt_text.removesuffix("\n")
    if options.prompt is None and sys.stdin is not None and sys.stdin.isatty():
        raise ValueError(
            "no prompt: give it as an argument, with --prompt-file, or on standard input"
        )
    return read_input("prompt")


def sampling_params(sampling: Sampling) -> SamplingParams:
    """Collect the parameters that were given. Refuse those that greedy decoding ignores."""
    given = {name: value for name, value in asdict(sampling).items() if value is not None}
    for name in ("top_p", "top_k", "min_p"):
        if name in given and given["temperature"] == 0:
            option = f"--{name.replace('_', '-')} {given[name]}"
            raise ValueError(
                f"{option} with --temperature 0, which takes the best token: give --temperature too"
            )
    return from_mapping(SamplingParams, given)


def note_seed(seed: object, temperature: float) -> None:
    """Say that greedy decoding draws nothing; scripts written for vLLM give a seed anyway."""
    if seed is not None and temperature == 0:
        print("seed has no effect at temperature 0", file=sys.stderr)


def _write(
    llm: "specdec.LLM", prompt: str, params: SamplingParams, options: GenerateOptions
) -> RequestOutput:
    """Write one sample as its rounds commit; several samples or JSON once all are finished."""
    if _is_text(options, params):
        _echo_prompt(prompt)
    output = _run(llm, prompt, params, options)
    if options.json:
        print(json.dumps(as_json(llm, output, options.show_drafts)))
        return output
    if params.n > 1:
        for number, completion in enumerate(output.outputs, start=1):
            print(f"--- sample {number} of {params.n} ---\n{completion.text}")
    _report(output, params)
    return output


def _is_text(options: GenerateOptions, params: SamplingParams) -> bool:
    """Say whether the text is written as it comes."""
    return not (options.json or options.show_drafts or params.n > 1)


def _run(
    llm: "specdec.LLM", prompt: str, params: SamplingParams, options: GenerateOptions
) -> RequestOutput:
    """Return the finished output. Ctrl-C prints the figures so far, except as JSON."""
    [request] = llm.engine.add_requests([NewRequest(prompt=prompt, params=params)])
    room = request.rules.max_tokens
    if params.max_tokens is not None and room < params.max_tokens:
        cut = f"--max-tokens {params.max_tokens}: {room} tokens fit after the prompt"
        print(cut, file=sys.stderr)
    writer = _writer(llm, request, params, options)
    try:
        while not request.is_finished:
            llm.engine.step()
            writer.write()
    except KeyboardInterrupt:
        output = whole_output(request)
        output.finished = False
        writer.end()
        if not options.json:
            _report(output, params)
        raise
    writer.end()
    return whole_output(request)


def _writer(
    llm: "specdec.LLM", request: Request, params: SamplingParams, options: GenerateOptions
) -> Writer:
    if _is_text(options, params):
        return TextWriter(request)
    if options.json or params.n > 1:
        return NoWriter()
    console = new_console()
    prompt = request.prompt if console.is_terminal else None
    return DraftsWriter(request, llm.tokenizer, DraftsView(console, prompt))


def _report(output: RequestOutput, params: SamplingParams) -> None:
    """Print the seed, if one was used, and the figures."""
    if output.seed is not None and params.temperature > 0:
        print(f"seed {output.seed}", file=sys.stderr)
    print(figures(output), file=sys.stderr)


def _echo_prompt(prompt: str) -> None:
    """Print the prompt before its continuation on a terminal; a pipe gets the text alone."""
    console = new_console(stderr=True)
    if console.is_terminal and sys.stdout.isatty():
        console.print(Text(prompt, style="dim"), end="")


def new_console(stderr: bool = False) -> Console:
    """Make a console, without escape sequences if NO_COLOR is set; rich would keep bold, dim."""
    system: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=stderr, highlight=False, soft_wrap=True, color_system=system)


def leave_on_error(output: RequestOutput, wording: Wording) -> None:
    """Leave with exit code 2 if a sample ended in an error, whatever part of it was written."""
    endings = [each for each in output.outputs if each.finish_reason == "error"]
    for ending in endings:
        print(f"specdec: error: {wording.text(str(ending.stop_reason))}", file=sys.stderr)
    if endings:
        raise SystemExit(2)
