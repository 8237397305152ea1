"""How a command ends: 0, 1 for a check that failed, 2 for what cannot be done, 130 for Ctrl-C.

Whatever cannot be done is one line on stderr. SPECDEC_DEBUG=1 shows tracebacks instead.
"""

import logging
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from typer import Abort, BadParameter, Typer
from typer.main import get_command

from specdec.parallel.processes import RankError
from weights.errors import CheckpointError

# of the click that typer uses, its own copy or the package
UsageError = cast(type[Exception], BadParameter.__bases__[0])
REFUSED, FAILED = 2, 1  # exit codes: of what was given, and of what happened
INTERRUPTED = 130  # what a shell gives for Ctrl-C
# one command; `bench` alone takes a target, and one in the directory `serve` is ./serve
BENCH_SERVE = "bench serve"
GONE = {  # commands of earlier versions, and what to do instead
    "cache": "set TRITON_CACHE_DIR, and copy that folder to the same path on other machines",
}
# advice that helps in Python only
PYTHON_ONLY = (
    (r", or None for the end of the context", ""),
    (r", or None( to have one drawn| for the engine's)?", ", or leave it out"),
    (r"max_num_batched_tokens=\d+ or ", ""),
    (r", max_num_seqs or max_num_batched_tokens", " or max_num_seqs"),
    (r"num_kv_blocks=(\d+): raise num_kv_blocks, or lower", r"there are \1: lower"),
)
LENGTH = "max_model_len"


def run_command(app: Typer, given: Sequence[str]) -> None:
    """Run the command and exit. Its `obj` is what a command knows of its own call."""
    wording = Wording({})
    try:
        set_up_logging()
        line = shlex.join(["specdec", *_without_keys(given)])
        if list(given[:2]) == BENCH_SERVE.split():
            given = [BENCH_SERVE, *given[2:]]
        if given and given[0] in GONE:
            raise ValueError(f"the command {given[0]!r} is gone: {GONE[given[0]]}")
        command = get_command(app)
        wording = wording_of(command, given)
        called = {"command": line, "wording": wording}
        code = command.main(list(given), "specdec", obj=called, standalone_mode=False)
    except UsageError as error:
        raise SystemExit(_refuse(_usage(error, given), error)) from None
    except (ValueError, OSError) as error:
        raise SystemExit(_refuse(wording.line(error), error)) from None
    except RankError as error:
        raise SystemExit(_refuse(str(error), error, FAILED)) from None
    except (KeyboardInterrupt, Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("specdec: interrupted", file=sys.stderr)
    raise SystemExit(code or 0)


def _without_keys(given: Sequence[str]) -> list[str]:
    words = [re.sub("^--api-key=.*", "--api-key=...", word, flags=re.DOTALL) for word in given]
    return ["..." if i and given[i - 1] == "--api-key" else each for i, each in enumerate(words)]


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


def _refuse(line: str, error: Exception, code: int = REFUSED) -> int:
    """Print the line, unless tracebacks are wanted, and return the exit code."""
    if os.environ.get("SPECDEC_DEBUG", "0") not in ("", "0"):
        raise error
    print(f"specdec: error: {line}", file=sys.stderr)
    return code


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


def wording_of(app: object, given: Sequence[str]) -> "Wording":
    """Make the words of the command that is called."""
    command = getattr(app, "commands", {}).get(given[0]) if given else None
    params = () if command is None else command.params
    names = {param.name: f"--{param.name.replace('_', '-')}" for param in params}
    options = {param.name: names[param.name] for param in params if names[param.name] in param.opts}
    if "draft" in options:
        options["model"] = "--draft"
    return Wording(options, any(arg.startswith("--max-model-len") for arg in given))


@dataclass(frozen=True, slots=True)
class Wording:
    """Words errors of the engine for a command: `max_model_len=64` becomes `--max-model-len 64`.

    options: those of the command, by the argument that each sets. Advice about others is left out.
    has_length: --max-model-len is given. If not, the length is the longest there is.
    """

    options: Mapping[str, str]
    has_length: bool = False

    def line(self, error: Exception) -> str:
        """Word an error in one line, unless it lists several problems of a checkpoint."""
        if not isinstance(error, CheckpointError):
            return self.text(re.sub(r"\s*\n\s*", " ", str(error)))
        if len(error.problems) > 1:
            return str(error)
        # it names keys of the checkpoint, which are no options; only a length may be advised
        problem, option = error.problems[0], self.options.get(LENGTH)
        problem = problem if option is None else _with_option(problem, LENGTH, option)
        return f"{error.directory}: {problem}; nothing loaded"

    def text(self, text: str) -> str:
        """Word a message about options."""
        for pattern, words in PYTHON_ONLY:
            text = re.sub(pattern, words, text)
        if not self.has_length:
            text = text.replace(f", or raise {LENGTH}", "")
        for name, option in self.options.items():
            text = _with_option(text, name, option)
        return text


def _with_option(text: str, name: str, option: str) -> str:
    """Write name=value as `--name value`, name=True as `--name`; a bare name only if it has a _."""
    begin = rf"(?<![\w./-]){name}"
    text = re.sub(rf"{begin}=True\b", option, text)
    text = re.sub(rf"{begin}=", f"{option} ", text)
    return re.sub(rf"{begin}(?![\w-]|\.\w)", option, text) if "_" in name else text
