"""The command `specdec` and its commands. The docstring of a command's options is its help.

A command imports its file when it is called, and torch only after its own checks: neither
`specdec --help` nor the answer to a mistake should wait for it. Text and JSON go to stdout,
everything else to stderr. SPECDEC_LOG sets the log level; SPECDEC_DEBUG=1 shows tracebacks.
"""

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

from typer import Context, Exit, Option, Typer, echo

import specdec
from specdec.cli import choices
from specdec.cli.bench_choices import BenchChoices, BenchServeChoices
from specdec.cli.command import declare
from specdec.cli.errors import BENCH_SERVE, run_command

ABOUT = "Text from a target model with an EAGLE draft, equal to plain decoding bit for bit."
app = Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)

# what a command is given, and the file of this folder that runs it
COMMANDS: dict[str, tuple[type, str]] = {
    "generate": (choices.GenerateOptions, "generate"),
    "chat": (choices.ChatOptions, "chat"),
    "inspect": (choices.InspectOptions, "checkpoints"),
    "verify": (choices.VerifyOptions, "verify"),
    "serve": (choices.ServeOptions, "serve"),
    "batch": (choices.BatchOptions, "batch"),
    "bench": (BenchChoices, "bench"),
    BENCH_SERVE: (BenchServeChoices, "bench_serve"),
    "load": (choices.LoadOptions, "checkpoints"),
    "convert": (choices.ConvertOptions, "checkpoints"),
    "widen": (choices.WidenOptions, "checkpoints"),
    "tune": (choices.TuneOptions, "tune"),
    "env": (choices.EnvOptions, "env"),
}


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and exit."""
    run_command(app, sys.argv[1:] if args is None else list(args))


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"specdec {specdec.__version__}")
        raise Exit


@app.callback(invoke_without_command=True, help=ABOUT)
def begin(
    context: Context,
    version: Annotated[
        bool,
        Option("--version", is_eager=True, callback=_show_version, help="print it and exit"),
    ] = False,
) -> None:
    """Print the help if no command is given."""
    if context.invoked_subcommand is None:
        echo(context.get_help(), err=True)
        raise Exit(2)


def _run(name: str, file: str, options: object) -> None:
    """Check the options before the command's file, and perhaps torch, is imported."""
    function = name.replace(" ", "_")
    checks = importlib.import_module("specdec.cli.before_torch")
    getattr(checks, f"check_{function}", lambda _: None)(options)
    module = importlib.import_module(f"specdec.cli.{file}")
    getattr(module, f"run_{function}")(options)


for name, (options, file) in COMMANDS.items():
    declare(app, name, options, partial(_run, name, file))
