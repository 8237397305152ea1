"""The command `specdec`: its commands and their options. The file named after a command runs it.

A command imports its file when it is called, and torch only after its own checks: neither
`specdec --help` nor the answer to a mistake should wait for it. Text and JSON go to stdout,
everything else to stderr. SPECDEC_LOG sets the log level; SPECDEC_DEBUG=1 shows tracebacks.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Exit, Option, Typer, echo

import specdec
from specdec.cli import options as shared
from specdec.cli.choices import (
    BatchOptions,
    BenchChoices,
    ChatOptions,
    GenerateOptions,
    ServeOptions,
    VerifyOptions,
)
from specdec.cli.command import command
from specdec.cli.errors import BENCH_SERVE, run_command
from specdec.cli.extras import require_extra
from specdec.options import EngineOptions

app = Typer(
    help="Text from a target model with an EAGLE draft, equal to plain decoding bit for bit.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and exit."""
    run_command(app, sys.argv[1:] if args is None else list(args))


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"specdec {specdec.__version__}")
        raise Exit


@app.callback(invoke_without_command=True)
def begin(
    context: Context,
    version: Annotated[
        bool,
        Option("--version", is_eager=True, callback=_show_version, help="print it and exit"),
    ] = False,
) -> None:
    """Text from a target model with an EAGLE draft, equal to plain decoding bit for bit."""
    if context.invoked_subcommand is None:
        echo(context.get_help(), err=True)
        raise Exit(2)


@command(app, "Continue a prompt.")
def generate(options: GenerateOptions) -> None:
    """Continue a prompt: the text on stdout as it is written, a line of statistics on stderr."""
    from specdec.cli.generate import run_generate

    run_generate(options)


@command(app, "Talk to a target.")
def chat(options: ChatOptions) -> None:
    """Talk to a target that has a chat template.

    /reset starts over, Ctrl-C ends an answer, Ctrl-D or /exit the program. If standard input is no
    terminal, all of it is one message, and its answer is printed.
    """
    from specdec.cli.chat import run_chat

    run_chat(options)


@app.command(short_help="Say what a checkpoint is.")
def inspect(
    checkpoint: Annotated[
        str,
        Argument(
            metavar="CHECKPOINT",
            help='directory, hub id, "demo", "demo/eagle3" or "demo/eagle1"',
        ),
    ],
    target: Annotated[
        str | None, Option(help="the target that a draft is meant for: checks more")
    ] = None,
    json: shared.Json = False,
) -> None:
    """Say what a checkpoint is, every field with its source, without loading it."""
    from specdec.cli.before_torch import check_models, checkpoint_directory

    if target is not None:
        check_models(target, None)
    directory = checkpoint_directory(checkpoint)
    from specdec.cli.inspect import run_inspect

    run_inspect(directory, target, json)


@command(app, "Say whether a draft works.")
def verify(options: VerifyOptions) -> None:
    """Load both, force the target's own text through the draft, and say whether the draft works."""
    from specdec.cli.verify import run_verify

    run_verify(options)


@command(app, "Answer requests over HTTP.")
def serve(options: ServeOptions) -> None:
    """Answer requests in OpenAI's API: chat, completions, streams, metrics.

    Only this machine can connect unless --host says otherwise. SIGTERM or Ctrl-C ends it in order.
    """
    require_extra("serve", "server", ("starlette", "uvicorn", "httptools", "prometheus_client"))
    from specdec.cli.serve import checked_address
    from specdec.serve.worker_process import WorkerProcess

    # the worker imports for seconds, and so does this process
    with checked_address(options) as address, WorkerProcess() as worker:
        from specdec.cli.server import run_server

        run_server(options, address, worker)


@command(app, "Answer the lines of a batch file.")
def batch(options: BatchOptions) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Each line of IN has custom_id, method, url and body. OUT gets a line for each, in the same
    order, with an error where a line cannot be answered. The same command goes on with a run that
    was stopped.
    """
    require_extra("batch", "server", ("starlette", "uvicorn", "prometheus_client"))
    if options.ray is not None:
        require_extra("batch --ray", "ray", ("ray", "pyarrow", "pandas"))
    from specdec.cli.batch import check_batch

    check_batch(options)
    from specdec.cli.batch_here import run_batch

    if options.ray is None:
        run_batch(options)
        return
    from specdec.cli.batch_on_ray import run_batch_on_ray

    run_batch_on_ray(options)


@command(app, "Measure speed beside plain decoding.")
def bench(options: BenchChoices) -> None:
    """Measure speed beside plain decoding in one process; refuse figures where outputs differ."""
    from specdec.cli.before_torch import check_models
    from specdec.cli.bench_options import refuse_unread
    from specdec.cli.extras import check_outputs

    refuse_unread(options)
    check_outputs(options.json, options.charts)
    engine: EngineOptions = {"dtype": options.dtype, "device": options.device}
    check_models(options.target, options.eagle, engine)
    from specdec.cli.bench import run_bench

    run_bench(options)


@app.command(BENCH_SERVE, short_help="Measure a server under load.")
def bench_serve(
    context: Context,
    url: Annotated[
        str,
        Argument(
            metavar="URL",
            help="of a server of OpenAI's API: http://127.0.0.1:8000",
            show_default=False,
        ),
    ],
    rates: Annotated[
        str, Option("--request-rate", help="requests a second, a run for each: 1,2,4")
    ] = "1",
    num_requests: Annotated[int, Option(min=1, help="of each run")] = 100,
    model: Annotated[
        str | None, Option(help="the model's name", show_default="the first one listed")
    ] = None,
    is_chat: Annotated[
        bool, Option("--chat", help="ask for chat completions, not for completions")
    ] = False,
    max_tokens: Annotated[
        int | None, Option(min=1, help="most tokens of an answer", show_default="1024")
    ] = None,
    temperature: Annotated[
        float | None, Option(help="of each request", show_default="the server's")
    ] = None,
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="ask for full lengths (vLLM and specdec know it)")
    ] = False,
    goodput: Annotated[
        str | None,
        Option(help="limits in ms that a good answer keeps: ttft:500,tpot:50", show_default="none"),
    ] = None,
    seed: Annotated[int, Option(help="of arrivals, lengths and prompts")] = 0,
    timeout: Annotated[float, Option(min=0, help="seconds that an answer may pause")] = 600.0,
    api_key: Annotated[
        str | None, Option(envvar="SPECDEC_API_KEY", help="sent with each request")
    ] = None,
    json: Annotated[Path | None, Option(help="write the last line's JSON to a file too")] = None,
    charts: Annotated[
        Path | None, Option(help="directory for a PNG chart (needs matplotlib)")
    ] = None,
) -> None:
    """Send requests that arrive at random, and say how long they wait.

    Arrivals are a Poisson process, whatever the server's speed; lengths are like ShareGPT's.
    """
    require_extra("bench serve", "bench", ["httpx2"])
    from specdec.cli.bench_serve import BenchServeCommand, run_bench_serve

    given = {**context.params, "command": context.obj}
    run_bench_serve(shared.options_of(BenchServeCommand, given))


@app.command(short_help="Load a checkpoint and time it.")
def load(
    target: shared.Target,
    draft: Annotated[
        str | None,
        Argument(
            metavar="DRAFT", help='EAGLE draft: directory, hub id or "demo"', show_default=False
        ),
    ] = None,
    dtype: Annotated[
        str, Option(help="auto, float32, bfloat16 or float16; auto is as the target is stored")
    ] = "auto",
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N")] = "cpu",
) -> None:
    """Load a checkpoint, print what every field was bound to, and time it."""
    from specdec.cli.before_torch import check_models

    check_models(target, draft, {"dtype": dtype, "device": device})
    from specdec.cli.load import run_load

    run_load(target, draft, dtype, device)


@app.command(short_help="Write safetensors from .bin files.")
def convert(
    directory: Annotated[
        Path,
        Argument(
            exists=True,
            file_okay=False,
            metavar="DIRECTORY",
            help="a checkpoint of .bin files, which stay as they are",
        ),
    ],
) -> None:
    """Write model.safetensors from .bin files, without running pickled code."""
    from specdec.cli.convert import run_convert

    run_convert(directory)


@app.command(short_help="Write a small pair at a large size.")
def widen(
    directory: Annotated[
        Path, Argument(file_okay=False, metavar="DIRECTORY", help="where to write the pair")
    ],
    source: Annotated[
        str, Option(help="demo, or a directory with target/, eagle3/ and prompts.json")
    ] = "demo",
    shape: Annotated[str, Option(help="llama-8b (18 GB in bfloat16) or tiny")] = "llama-8b",
    dtype: Annotated[str, Option(help="bfloat16 or float32")] = "bfloat16",
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N")] = "auto",
) -> None:
    """Write a small pair at a large size: the same text and drafts, at the full cost.

    DIRECTORY gets target/, eagle3/ and prompts.json, for `specdec bench DIRECTORY/target`; and
    eagle1/, where the source has one.
    """
    from specdec.cli.before_torch import checked_source

    found = checked_source(source, shape, dtype)
    from specdec.cli.widen import run_widen

    run_widen(directory, found, shape, dtype, device)


@app.command(short_help="Measure the products of a model on this GPU.")
def tune(
    target: shared.Target,
    draft: shared.Draft = None,
    dtype: Annotated[
        str, Option(help="auto, bfloat16 or float16; auto is as the target is stored")
    ] = "auto",
    again: Annotated[
        bool, Option("--again", help="also measure products that a table already has")
    ] = False,
    json: shared.Json = False,
) -> None:
    """Find the fastest tiles for the products of a model and its draft on this GPU.

    They go to tiles.json in the cache directory ($SPECDEC_CACHE_DIR), which every process
    started later reads. Tokens stay the same. An interrupt keeps what was measured.
    """
    from specdec.cli.before_torch import check_models

    check_models(target, draft)
    from specdec.cli.tune import run_tune

    run_tune(target, draft, dtype, again, json)


@app.command(short_help="Print what a bug report needs.")
def env(json: shared.Json = False) -> None:
    """Print versions, GPU, driver and system: paste them into a bug report."""
    from specdec.cli.env import run_env

    run_env(json)
