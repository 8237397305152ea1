"""JSON from a client, whose values are counted before they are made.

Making millions of small lists takes seconds, most of them in the garbage collector, and json.loads
keeps the interpreter for its whole run. So the numbers of values, strings, lists and objects are
bounded, no collection runs meanwhile, and each number is made by a function of Python, before which
another thread may take its turn.
"""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager

MAX_VALUES = 1 << 20  # the token ids of long prompts are most of them
MAX_STRINGS = 1 << 18  # keys of objects included
MAX_CONTAINERS = 1 << 17  # lists and objects

# what each kind of thing in a JSON text begins with, outside strings; the first value has no comma
SIGNS = {
    "values": (MAX_VALUES, b",[{"),
    "lists and objects": (MAX_CONTAINERS, b"[{"),
    "keys": (MAX_STRINGS, b":"),
}


class JsonSizeError(ValueError):
    """Names what a text has too much of."""


def loads(data: bytes | str, allows_nan: bool = False) -> object:
    """Read a text in UTF-8; ValueError for invalid JSON, JsonSizeError for too much of it."""
    _check_counts(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
    text = data if isinstance(data, str) else data.decode("utf-8-sig")
    try:
        with _no_collection():
            constant = None if allows_nan else _refuse_constant
            return json.loads(text, parse_int=_integer, parse_float=_real, parse_constant=constant)
    except RecursionError as error:
        raise JsonSizeError("too many levels") from error


def _check_counts(data: bytes) -> None:
    """Count signs, within strings too where that is not too many, for it takes no copy."""
    if _surplus(data):
        data = _without_strings(data)
        surplus = _surplus(data)
        if surplus:
            raise JsonSizeError(f"more than {SIGNS[surplus][0]} {surplus}")
    _check_strings(data)


def _surplus(data: bytes) -> str | None:
    """Name the first kind of which there is too much."""
    return next(
        (
            name
            for name, (most, signs) in SIGNS.items()
            if sum(data.count(sign) for sign in signs) > most
        ),
        None,
    )


def _without_strings(data: bytes) -> bytes:
    data = _without_escapes(data)
    _check_strings(data)
    return b'""'.join(data.split(b'"')[::2])


def _check_strings(data: bytes) -> None:
    most = 2 * MAX_STRINGS
    if data.count(b'"') > most and _without_escapes(data).count(b'"') > most:
        raise JsonSizeError(f"more than {MAX_STRINGS} strings")


def _without_escapes(data: bytes) -> bytes:
    return data.replace(rb"\\", b"").replace(rb"\"", b"")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Stop garbage collection: JSON has no cycles, and each collection would walk all of it."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _integer(text: str) -> int:
    return int(text)


def _real(text: str) -> float:
    return float(text)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no number in JSON")
