"""Options that several commands share, and functions that read the text of an option."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, TypeVar

from typer import Argument, CallbackParam, Context, Option

from specdec.cli.user_files import MOST_TEXT, read_text
from specdec.cli.wording import Wording
from specdec.sizes import TreeShape
from specdec.speculative_config import AUTO

Options = TypeVar("Options")
Number = TypeVar("Number", int, float)
STANDARD_INPUT = "-"  # as a prompt or a file


def integers(*bounds: int) -> Callable[[CallbackParam, str | None], list[int] | None]:
    """Make the callback that reads "0,3,5". bounds: the least and the greatest number, if any."""
    return _numbers(int, "integers", bounds)


def floats(*bounds: float) -> Callable[[CallbackParam, str | None], list[float] | None]:
    """Make the callback that reads "0,0.7"."""
    return _numbers(float, "numbers", bounds)


def _numbers(
    read_one: Callable[[str], Number], kind: str, bounds: tuple[Number, ...]
) -> Callable[[CallbackParam, str | None], list[Number] | None]:
    def read(option: CallbackParam, text: str | None) -> list[Number] | None:
        if text is None:
            return None
        given = f"{option.opts[0]} {text}"
        try:
            values = [read_one(part) for part in text.split(",")]
        except ValueError:
            raise ValueError(f"{given}: give {kind} with commas between them") from None
        if bounds and not all(bounds[0] <= value <= bounds[1] for value in values):
            raise ValueError(f"{given}: give numbers of at least {bounds[0]}, at most {bounds[1]}")
        return values

    return read


def trees(option: CallbackParam, text: str | None) -> list[TreeShape] | None:
    """Read "8x6x4,16x6x4": rows, levels and top_k of draft trees."""
    if text is None:
        return None
    return [tree(option.opts[0], part, "8x6x4,16x6x4") for part in text.split(",")]


def tree(name: str, text: str, example: str = "16x6x4") -> TreeShape:
    """Read one tree. The option's name and the example are for errors."""
    try:
        num_rows, num_levels, top_k = map(int, text.split("x"))
    except ValueError:
        raise ValueError(f"{name} {text}: give rows x levels x top_k, as in {example}") from None
    shape = TreeShape(num_levels=num_levels, top_k=top_k, num_nodes=num_rows - 1)
    if min(num_levels, top_k - 1) < 1 or not 1 <= shape.num_nodes <= shape.num_candidates:
        raise ValueError(
            f"{name} {text}: a tree has 1 level or more, a top_k of 2 or more, and from 2 rows to "
            "as many as the root and all its candidates"
        )
    return shape


def num_drafts(option: CallbackParam, text: str | None) -> int | str | None:
    """Read a number of drafts, or "auto"."""
    if text is None or text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{option.opts[0]} {text}: give an integer, or auto") from None


def pairs(option: CallbackParam, text: str | None) -> dict[str, str] | None:
    """Read "a=b,c=d"."""
    if text is None:
        return None
    parts = [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in parts):
        raise ValueError(f"{option.opts[0]} {text}: give NAME=VALUE, with commas between them")
    return {name: value for name, _, value in parts}


def text_of(option: CallbackParam, file: str | None) -> str | None:
    """Read the file; `-` is standard input."""
    if file is None:
        return None
    if file == STANDARD_INPUT:
        return read_input(option.opts[0].removeprefix("--"))
    try:
        return read_text(Path(file))
    except UnicodeDecodeError as error:
        raise ValueError(f"{option.opts[0]} {file}: no text in UTF-8: {error}") from error
    except OSError as error:
        raise ValueError(f"{option.opts[0]} {file}: {error.strerror}; give a text file") from error
    except ValueError as error:
        wanted = f"give a text file, or {STANDARD_INPUT} for standard input"
        raise ValueError(f"{option.opts[0]} {error}; {wanted}") from error


def read_input(what: str) -> str:
    """Read standard input without its last line break; ValueError if it is empty."""
    try:
        text = "" if sys.stdin is None else sys.stdin.read(MOST_TEXT + 1)  # None: it is closed
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: no text in UTF-8: {error}") from error
    if len(text) > MOST_TEXT:
        raise ValueError(f"standard input: more than {MOST_TEXT} characters for the {what}")
    text = text.removesuffix("\n")
    if not text:
        raise ValueError(f"no {what}: standard input is empty")
    return text


def check_choice(name: str, given: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError if an option has another value."""
    if given not in allowed:
        raise ValueError(f"{name} {given}: allowed are {', '.join(allowed)}")


Target = Annotated[
    str,
    Argument(
        metavar="TARGET",
        help='directory, hub id, or "demo", the bundled pair',
        show_default=False,
    ),
]
Draft = Annotated[
    str | None,
    Option(help='EAGLE draft: directory, hub id or "demo"', show_default="no draft"),
]
Json = Annotated[bool, Option("--json", help="one JSON object on stdout and nothing else")]


def options_of(kind: type[Options], given: Mapping[str, object]) -> Options:
    """Pick the fields of `kind` from what was given."""
    names = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _typed(given[name], names[name]) for name in names if name in given})


def wording_of(context: Context) -> Wording:
    """Return the words for errors of the command that was called."""
    return Wording.of(context.command.params, context.params["max_model_len"] is not None)


def _typed(value: object, kind: object) -> object:
    """Make a path of text: some versions of Typer leave a context's paths as text."""
    return Path(value) if isinstance(value, str) and kind in (Path, Path | None) else value
