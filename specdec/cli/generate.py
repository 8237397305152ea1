"""`specdec generate`: write the continuation of a prompt to stdout, statistics to stderr."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Literal

from rich.console import Console
from rich.text import Text

import specdec
from specdec.arguments import from_mapping
from specdec.cli.before_torch import check_models
from specdec.cli.choices import ChatOptions, GenerateOptions
from specdec.cli.drafts_view import DraftsView
from specdec.cli.figures import as_json, note_seed, report, say_what_runs
from specdec.cli.readers import STANDARD_INPUT, read_input
from specdec.options import EngineOptions
from specdec.requests.intake import NewRequest
from specdec.requests.output import RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.request import Pieces, Request, whole_output


def run_generate(options: GenerateOptions) -> None:
    """Load, generate, print; exit code 2 if a sample ended in an error."""
    params = sampling_params(options)
    _check_output(options, params)
    engine: EngineOptions = {"max_num_seqs": min(params.n, 64), **options.engine}
    check_models(options.target, options.speculation, engine)
    prompt = read_prompt(options)
    llm = specdec.LLM(options.target, speculative_config=options.speculation, **engine)
    say_what_runs(llm)
    note_seed(options.sampling.seed, params.temperature)
    output = _generated(llm, prompt, params, options)
    if options.json:
        print(json.dumps(as_json(llm, output, options.show_drafts)))
    elif params.n > 1:
        for number, completion in enumerate(output.outputs, start=1):
            print(f"--- sample {number} of {params.n} ---\n{completion.text}")
    if report(output, options, has_figures=not options.json):
        raise SystemExit(2)


def sampling_params(options: GenerateOptions | ChatOptions) -> SamplingParams:
    """Collect the parameters that were given. Refuse options that greedy decoding ignores."""
    values = asdict(options.sampling)
    given = {name: value for name, value in values.items() if value is not None}
    if given["temperature"] == 0:
        for name in ("top_p", "top_k", "min_p"):
            if name in given:
                option = f"--{name.replace('_', '-')} {given[name]}"
                advice = "which takes the best token: give --temperature too"
                raise ValueError(f"{option} with --temperature 0, {advice}")
        rule = "exact" if options.speculation is None else options.speculation.acceptance
        if rule != "exact":
            raise ValueError(
                f"--acceptance {rule} with --temperature 0, where drafts are accepted if they are "
                "the best tokens: give --temperature too, or leave --acceptance out"
            )
    return from_mapping(SamplingParams, given)


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


def _generated(
    llm: "specdec.LLM", prompt: str, params: SamplingParams, options: GenerateOptions
) -> RequestOutput:
    """Write one sample as its rounds commit. Ctrl-C prints the figures so far, except as JSON."""
    [request] = llm.engine.add_requests([NewRequest(prompt=prompt, params=params)])
    room, most = request.rules.max_tokens, params.max_tokens
    if most is not None and room < most:
        print(f"--max-tokens {most}: {room} tokens fit after the prompt", file=sys.stderr)
    write = _writer(llm, request, options)
    try:
        while not request.is_finished:
            llm.engine.step()
            write(False)
    except KeyboardInterrupt:
        output = whole_output(request)
        output.finished = False
        write(True)
        if not options.json:
            report(output, options)
        raise
    write(True)
    return whole_output(request)


def _writer(
    llm: "specdec.LLM", request: Request, options: GenerateOptions
) -> Callable[[bool], None]:
    """Choose what shows what is new after a step; True: nothing will follow."""
    if options.json or request.params.n > 1:  # all of it is printed once the request has ended
        return lambda is_over: None
    console = new_console()
    if options.show_drafts:
        prompt = request.prompt if console.is_terminal else None
        return DraftsView(console, prompt).following(request, llm.tokenizer)
    pieces = Pieces(request)
    # the prompt comes before its continuation on a terminal; a pipe gets the text alone
    errors = new_console(stderr=True)
    if errors.is_terminal and sys.stdout.isatty():
        errors.print(Text(request.prompt or "", style="dim"), end="")

    def write(is_over: bool) -> None:
        for piece in pieces.new():
            print(piece.text, end="", flush=True)
        if is_over:
            print(flush=True)

    return write


def new_console(stderr: bool = False) -> Console:
    """Make a console, without escape sequences if NO_COLOR is set; rich would keep bold, dim."""
    system: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=stderr, highlight=False, soft_wrap=True, color_system=system)
