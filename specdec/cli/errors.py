"""How a command ends: 0, 1 for a check that failed, 2 for what cannot be done, 130 for Ctrl-C.

Whatever cannot be done is one line on stderr. SPECDEC_DEBUG=1 shows tracebacks instead.
"""

import logging
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import cast

from typer import Abort, BadParameter, Typer
from typer.main import get_command

from specdec.cli.wording import Wording

# of the click that typer uses, its own copy or the package
UsageError = cast(type[Exception], BadParameter.__bases__[0])
INTERRUPTED = 130  # what a shell gives for Ctrl-C
BENCH_SERVE = "bench serve"  # one command; `bench` alone takes a target
GONE = {  # commands of earlier versions, and what to do instead
    "cache": "set TRITON_CACHE_DIR, and copy that folder to the same path on other machines",
}


def run_command(app: Typer, given: Sequence[str]) -> None:
    """Run the command and exit. Its `obj` is what a command knows of its own call."""
    wording = Wording({})
    try:
        set_up_logging()
        line = shlex.join(["specdec", *_without_keys(given)])
        given = _joined(given)
        if given and given[0] in GONE:
            raise ValueError(f"the command {given[0]!r} is gone: {GONE[given[0]]}")
        command = get_command(app)
        wording = _wording(command, given)
        called = {"command": line, "wording": wording}
        code = command.main(list(given), "specdec", obj=called, standalone_mode=False)
    except UsageError as error:
        raise SystemExit(_refuse(_usage(error, given), error)) from None
    except (ValueError, OSError) as error:
        raise SystemExit(_refuse(wording.line(error), error)) from None
    except (KeyboardInterrupt, Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("specdec: interrupted", file=sys.stderr)
    raise SystemExit(code or 0)


def _without_keys(given: Sequence[str]) -> list[str]:
    """Return the command as it may be shown and written to files."""
    words = [re.sub("^--api-key=.*", "--api-key=...", word, flags=re.DOTALL) for word in given]
    return ["..." if i and given[i - 1] == "--api-key" else each for i, each in enumerate(words)]


def _joined(given: Sequence[str]) -> list[str]:
    """Make one word of `bench serve`. (A target in the directory `serve` is ./serve.)"""
    return [BENCH_SERVE, *given[2:]] if list(given[:2]) == BENCH_SERVE.split() else [*given]


def set_up_logging() -> None:
    """Log to stderr from the level that SPECDEC_LOG names; ValueError if there is none."""
    name = os.environ.get("SPECDEC_LOG", "warning")
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise ValueError(f"SPECDEC_LOG={name!r}: give debug, info, warning or error")
    logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stderr)
    for package in ("specdec", "graphs", "weights"):
        logging.getLogger(package).setLevel(level)
    # advice for callers of LLM(): commands choose the number of threads themselves
    logging.getLogger("specdec.threads").setLevel(logging.ERROR)


def _refuse(line: str, error: Exception) -> int:
    """Print the line, unless tracebacks are wanted, and return the exit code."""
    if os.environ.get("SPECDEC_DEBUG", "0") not in ("", "0"):
        raise error
    print(f"specdec: error: {line}", file=sys.stderr)
    return 2


def _usage(error: Exception, given: Sequence[str]) -> str:
    """Say what was wrong with the arguments, and which help lists them."""
    message = getattr(error, "format_message", error.__str__)()
    option = _given_option(getattr(error, "param", None), given)
    if option is not None:
        message = f"{option}: {getattr(error, 'message', message)}"
    message = re.sub(r"\s*\n\s*", " ", message).rstrip(".")
    context = getattr(error, "ctx", None)
    path = "specdec" if context is None else context.command_path
    return f"{message[:1].lower()}{message[1:]} (see {path} --help)"


def _given_option(param: object, given: Sequence[str]) -> str | None:
    """Find the option of a value that is not allowed, and the value."""
    for arg, following in zip(given, [*given[1:], ""], strict=True):
        name, equals, value = arg.partition("=")
        if name in getattr(param, "opts", ()) and name.startswith("-"):
            return f"{name} {value if equals else following}"
    return None


def _wording(app: object, given: Sequence[str]) -> Wording:
    command = getattr(app, "commands", {}).get(given[0]) if given else None
    has_length = any(arg.startswith("--max-model-len") for arg in given)
    return Wording.of([] if command is None else command.params, has_length)
