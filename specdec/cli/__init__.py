"""The command `specdec`: its commands and their options. The file named after a command runs it.

A command imports its file when it is called: `specdec --help` should not wait for torch. Text and
JSON go to stdout, everything else to stderr. SPECDEC_LOG sets the log level; SPECDEC_DEBUG=1 shows
tracebacks.
"""

import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option, Typer

from specdec.cli import options as shared

app = Typer(
    help="Text from a target model with an EAGLE draft, equal to plain decoding bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0, 1 for a check that failed, 2 for what cannot be done."""
    try:
        _set_up_logging(os.environ.get("SPECDEC_LOG", "warning"))
        given = sys.argv[1:] if args is None else list(args)
        app(args=given, prog_name="specdec", obj=shlex.join(["specdec", *given]))
    except (ValueError, OSError) as error:
        if os.environ.get("SPECDEC_DEBUG", "0") not in ("", "0"):
            raise
        print(f"specdec: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _set_up_logging(name: str) -> None:
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise ValueError(f"SPECDEC_LOG={name!r}: give debug, info, warning or error")
    logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stderr)
    for package in ("specdec", "graphs", "weights"):
        logging.getLogger(package).setLevel(level)


@app.command()
def generate(
    context: Context,
    target: shared.Target,
    prompt: Annotated[
        str | None, Argument(help="default: --prompt-file, or standard input")
    ] = None,
    prompt_text: Annotated[
        Path | None,
        Option(
            "--prompt-file",
            exists=True,
            dir_okay=False,
            callback=shared.text_of,
            help="a text; its last line break is dropped",
        ),
    ] = None,
    draft: shared.Draft = None,
    num_speculative_tokens: shared.NumSpeculativeTokens = None,
    max_tokens: shared.MaxTokens = 256,
    temperature: shared.Temperature = 0.0,
    top_p: shared.TopP = None,
    top_k: shared.TopK = None,
    min_p: shared.MinP = None,
    seed: shared.Seed = None,
    n: Annotated[int, Option("-n", "--n", min=1, help="samples; number i has seed + i")] = 1,
    presence_penalty: Annotated[
        float, Option(help="subtracted from the logits of generated tokens")
    ] = 0.0,
    frequency_penalty: Annotated[float, Option(help="the same, times their count")] = 0.0,
    repetition_penalty: shared.RepetitionPenalty = 1.0,
    min_tokens: Annotated[int, Option(help="no end of text before this many tokens")] = 0,
    logprobs: Annotated[
        int | None, Option(help="JSON: this many alternatives beside each token")
    ] = None,
    acceptance: shared.Acceptance = "exact",
    stop: shared.Stop = None,
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="go on after an end-of-text token")
    ] = False,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    max_model_len: shared.MaxModelLen = None,
    enable_prefix_caching: shared.NoPrefixCaching = False,
    enforce_eager: shared.EnforceEager = False,
    cuda_graph_sizes: shared.GraphSizes = None,
    cuda_graph_token_sizes: shared.GraphTokenSizes = None,
    json: shared.Json = False,
    show_drafts: Annotated[
        bool, Option("--show-drafts", help="colour what was drafted; JSON: rounds")
    ] = False,
) -> None:
    """Continue a prompt: the text on stdout as it is written, a line of statistics on stderr."""
    from specdec.cli.generate import GenerateOptions, run_generate

    run_generate(shared.options_of(GenerateOptions, context.params))


@app.command()
def chat(
    context: Context,
    target: shared.Target,
    draft: shared.Draft = None,
    num_speculative_tokens: shared.NumSpeculativeTokens = None,
    system: Annotated[
        str | None, Option(help="the conversation's first message, with the role system")
    ] = None,
    chat_template: Annotated[
        Path | None,
        Option(
            exists=True,
            dir_okay=False,
            callback=shared.text_of,
            help="Jinja text",
            show_default="the tokenizer's own",
        ),
    ] = None,
    max_tokens: shared.MaxTokens = 1024,
    temperature: shared.Temperature = 0.0,
    top_p: shared.TopP = None,
    top_k: shared.TopK = None,
    min_p: shared.MinP = None,
    seed: shared.Seed = None,
    repetition_penalty: shared.RepetitionPenalty = 1.0,
    acceptance: shared.Acceptance = "exact",
    stop: shared.Stop = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    max_model_len: shared.MaxModelLen = None,
    enable_prefix_caching: shared.NoPrefixCaching = False,
    enforce_eager: shared.EnforceEager = False,
    cuda_graph_sizes: shared.GraphSizes = None,
    cuda_graph_token_sizes: shared.GraphTokenSizes = None,
) -> None:
    """Talk to a target that has a chat template.

    /reset starts over, Ctrl-C ends an answer, Ctrl-D or /exit the program. If standard input is no
    terminal, all of it is one message, and its answer is printed.
    """
    from specdec.cli.chat import ChatOptions, run_chat

    run_chat(shared.options_of(ChatOptions, context.params))


@app.command()
def inspect(
    checkpoint: Annotated[
        str,
        Argument(
            help='directory, hub id, "demo", "demo/eagle3" or "demo/eagle1"', show_default=False
        ),
    ],
    target: Annotated[
        str | None, Option(help="the target that a draft is meant for: checks more")
    ] = None,
    json: shared.Json = False,
) -> None:
    """Say what a checkpoint is, every field with its source, without loading it."""
    from specdec.cli.inspect import run_inspect

    run_inspect(checkpoint, target, json)


@app.command()
def verify(
    context: Context,
    target: shared.Target,
    draft: Annotated[
        str, Argument(help='EAGLE draft: directory, hub id or "demo"', show_default=False)
    ],
    num_speculative_tokens: Annotated[
        int, Option("--num-speculative-tokens", "-k", min=0, help="positions to check")
    ] = 5,
    max_tokens: Annotated[int, Option(min=16, help="tokens of text per prompt")] = 64,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    enforce_eager: shared.EnforceEager = False,
    cuda_graph_sizes: shared.GraphSizes = None,
    cuda_graph_token_sizes: shared.GraphTokenSizes = None,
    json: shared.Json = False,
) -> None:
    """Load both, force the target's own text through the draft, and say whether the draft works."""
    from specdec.cli.verify import VerifyOptions, run_verify

    run_verify(shared.options_of(VerifyOptions, context.params))


SUITES = (
    "protocol, rounds, exactness, k, batch, context, products, gaps, requests, waiting, prefill, "
    "capture, padding, memory, cold; with commas; or all"
)


@app.command()
def bench(
    context: Context,
    target: Annotated[
        str, Argument(help='directory, hub id, or "demo", the bundled pair')
    ] = "demo",
    draft: Annotated[
        str | None, Option(help='EAGLE draft; default: "demo" for "demo", else none')
    ] = None,
    suite: Annotated[str, Option(help=SUITES)] = "protocol",
    ks: Annotated[
        str | None,
        Option(
            "--num-speculative-tokens",
            "-k",
            callback=shared.integers(0, 32),
            help="values of K; 0, plain decoding, is always one",
            show_default="0,3,5",
        ),
    ] = None,
    batches: Annotated[
        str | None,
        Option(
            "--batch",
            callback=shared.integers(1, 4096),
            help="requests at a time",
            show_default="1,8,32 on a GPU, 1 on a CPU",
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        Option(
            callback=shared.integers(1, 1 << 24),
            help="prompt lengths of the suite context",
            show_default="256,1024,4096,8192,16384,32768",
        ),
    ] = None,
    num_prompts: Annotated[int, Option(min=1, max=4096, help="prompts at the small batches")] = 8,
    prompts: Annotated[
        Path | None, Option(exists=True, help="default: prompts.json beside the target")
    ] = None,
    max_tokens: Annotated[int, Option(min=2, help="tokens of each answer")] = 160,
    max_model_len: Annotated[
        int, Option(min=2, max=1 << 24, help="longest context, except in the suite context")
    ] = 4096,
    repeats: Annotated[int, Option(min=1, help="whole runs, the best of which counts")] = 2,
    num_rounds: Annotated[int, Option(min=1, help="rounds timed by the device's clock")] = 30,
    rounds_of_memory: Annotated[
        int | None, Option(min=1, help="rounds of the suite memory", show_default="1000")
    ] = None,
    max_seconds: Annotated[
        float | None, Option(min=0, help="begin nothing more after this many seconds")
    ] = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    json: Annotated[Path | None, Option(help="write the last line's JSON to a file too")] = None,
    charts: Annotated[
        Path | None, Option(help="directory for PNG charts (needs matplotlib)")
    ] = None,
) -> None:
    """Measure speed beside plain decoding in one process; refuse figures where outputs differ."""
    from specdec.bench.bench import BenchOptions
    from specdec.cli.bench import BenchCommand, default_batches, refuse_unread, run_bench

    draft = draft or ("demo" if target == "demo" else None)
    suites = tuple(suite.split(","))
    refuse_unread(suites, draft, context.params)
    given = {name: value for name, value in context.params.items() if value is not None}
    options = shared.options_of(BenchOptions, {"batches": default_batches(device), **given})
    paths = {"prompts": prompts, "json": json, "charts": charts}
    rest = {"command": context.obj, "draft": draft, "suites": suites, "options": options}
    run_bench(shared.options_of(BenchCommand, {**given, **paths, **rest}))
