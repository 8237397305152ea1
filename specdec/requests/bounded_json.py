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

# the most of each kind of thing, what it has in a JSON text outside of strings, and how often; the
# first value has no comma
SIGNS = {
    "strings": (MAX_STRINGS, b'"', 2),
    "values": (MAX_VALUES, b",[{", 1),
    "lists and objects": (MAX_CONTAINERS, b"[{", 1),
    "keys": (MAX_STRINGS, b":", 1),
}


class JsonSizeError(ValueError):
    """Names what a text has too much of."""


def loads(data: bytes | str, allows_nan: bool = False) -> object:
    """Read a text in UTF-8; ValueError for invalid JSON, JsonSizeError for too much of it."""
    _check_counts(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
    text = data if isinstance(data, str) else data.decode("utf-8-sig")
    try:
        with _no_collection():
            return json.loads(
                text,
                parse_int=lambda digits: int(digits),  # not int itself, which lets no thread run
                parse_float=lambda digits: float(digits),
                parse_constant=None if allows_nan else _refuse_constant,
            )
    except RecursionError as error:
        raise JsonSizeError("too many levels") from error


def _check_counts(data: bytes) -> None:
    """Count signs, within strings too where that is not too many, for it takes no copy."""
    surplus = _surplus(data)
    if surplus is not None:
        data = data.replace(rb"\\", b"").replace(rb"\"", b"")
        surplus = _surplus(data)
    if surplus is not None and surplus != "strings":  # few enough to be taken out one by one
        surplus = _surplus(b'""'.join(data.split(b'"')[::2]))
    if surplus is not None:
        raise JsonSizeError(f"more than {SIGNS[surplus][0]} {surplus}")


def _surplus(data: bytes) -> str | None:
    for name, (most, signs, times) in SIGNS.items():
        if sum(data.count(sign) for sign in signs) > times * most:
            return name
    return None


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


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no number in JSON")
