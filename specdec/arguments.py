"""Checks of a caller's arguments: a ValueError names it, what is allowed, and a likely typo."""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import wraps
from numbers import Integral, Rational, Real
from typing import Any, TypeGuard, TypeVar

TEXTS = (str, bytes, bytearray, memoryview)
MOST_NAMES, LONGEST_NAME = 20, 100  # for which a likely one is looked up
Config = TypeVar("Config")
Value = TypeVar("Value")


def is_integer(value: object) -> TypeGuard[int]:
    """Accept an integer of Python or numpy, but neither True nor a tensor that holds one."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def plain(value: Value) -> Value:
    """Make numbers of numpy Python's own, in lists, tuples, sets and dicts too."""
    found: Any = value
    if type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Integral):
        found = int(value)
    elif isinstance(value, Real) and not isinstance(value, Rational):
        found = float(value)
    elif isinstance(value, dict):
        found = {plain(key): plain(each) for key, each in value.items()}
    elif isinstance(value, list | tuple | set | frozenset):
        found = type(value)(map(plain, value))
    return found  # type: ignore[no-any-return]


def check_bool(name: str, value: object) -> None:
    """ValueError for anything but True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: give True or False")


def check_text(text: str) -> None:
    """Reject lone surrogates, which stand for bytes that are not UTF-8, as from a command line."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"character {error.start} is no Unicode text"
        raise ValueError(f"{text!r}: {what}; give text in UTF-8") from error


def is_list(values: object) -> bool:
    """Accept a sequence that is not text."""
    return isinstance(values, Sequence) and not isinstance(values, TEXTS)


def check_sizes(name: str, values: Sequence[int] | None, largest: int) -> None:
    """ValueError for anything but None and integers from 1 to `largest`."""
    if values is None:
        return
    if not is_list(values) or not values:
        raise ValueError(f"{name}={values!r}: give a list of integers")
    for value in values:
        if not is_integer(value) or not 1 <= value <= largest:
            wanted = f"{value!r} is not an integer from 1 to {largest}"
            raise ValueError(f"{name}={list(values)}: {wanted}")


def check_int(name: str, value: object, low: int, high: int) -> None:
    """ValueError for anything but an integer from `low` to `high`."""
    if not is_integer(value) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: give an integer from {low} to {high}")


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """ValueError for anything but one of the allowed values, by identity or as text."""
    # `is`, since 1 == True, and since a tensor or an array compares item by item
    if not (isinstance(value, str) and value in allowed) and all(value is not x for x in allowed):
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(str, allowed))}")


def check_name(name: str, value: object) -> None:
    """ValueError for anything but None and a string that is not empty."""
    if not isinstance(value, str | None) or value == "":
        raise ValueError(f"{name}={value!r}: give a string, or None")


def as_list(name: str, value: object, wanted: str) -> list[object]:
    """List the items of a collection; ValueError for text, bytes, mappings, sets, scalars."""
    with suppress(TypeError):  # a tensor or array without dimensions is Iterable, but iter() raises
        if isinstance(value, Iterable) and not isinstance(value, (*TEXTS, Mapping, Set)):
            return list(value)
    raise ValueError(f"{name}={value!r}: give {wanted}")


def refuse_unknown(
    owner: str,
    given: Iterable[object],
    allowed: Collection[str],
    advice: Mapping[str, str] | None = None,
) -> None:
    """ValueError if any of the names in `given` is not allowed: names the likely one, or all.

    advice: what to do instead of a name that is known from elsewhere
    """
    advice = advice or {}
    unknown = sorted(str(name) for name in given if name not in allowed)
    instead: dict[str, list[str]] = {}
    for name in unknown:
        if name in advice:
            instead.setdefault(advice[name], []).append(name)
    rest = [name for name in unknown if name not in advice]
    problems = [_with_likely(rest, allowed)] if rest else []
    problems += [f"{', '.join(names)}: {text}" for text, names in instead.items()]
    if problems:
        raise ValueError(f"{owner} does not take {'; nor '.join(problems)}")


def _with_likely(unknown: Sequence[str], allowed: Collection[str]) -> str:
    # a client may give many names, and long ones
    short = (name[:LONGEST_NAME] for name in unknown[:MOST_NAMES])
    matches = (difflib.get_close_matches(name, list(allowed), n=1) for name in short)
    close = next(filter(None, matches), None)
    hint = f"; did you mean {close[0]}?" if close else ""
    if not close or len(unknown) > 1:
        hint += f" (allowed: {', '.join(sorted(allowed))})"
    return f"{', '.join(unknown)}{hint}"


def refusing_unknown(
    advice: Mapping[str, str] | None = None, **aliases: str
) -> Callable[[type[Config]], type[Config]]:
    """Decorate a dataclass: keywords it does not have are a ValueError that says which it has.

    advice: as refuse_unknown has it. aliases: {another name: name}; both are a ValueError too.
    """

    def decorate(cls: type[Config]) -> type[Config]:
        create = cls.__init__
        names = [name for name in inspect.signature(create).parameters if name != "self"]

        @wraps(create)
        def checked(self: Config, *args: object, **values: object) -> None:
            refuse_unknown(cls.__name__, values, names, advice)
            for alias, name in aliases.items():
                if values.get(alias) is not None and name in values:
                    raise ValueError(f"{alias} is another name of {name}; give one of them")
            create(self, *args, **values)

        cls.__init__ = checked  # type: ignore[method-assign, assignment]
        return cls

    return decorate


def from_mapping(
    cls: type[Config], values: Mapping[str, object], advice: Mapping[str, str] | None = None
) -> Config:
    """Build a dataclass from a dict, refusing unknown and missing keys by name."""
    wanted = fields(cls)  # type: ignore[arg-type]
    refuse_unknown(cls.__name__, values, [field.name for field in wanted], advice)
    needed = [each.name for each in wanted if each.default is each.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        names = ", ".join(missing)
        raise ValueError(f"{cls.__name__} needs {names}, which {dict(values)!r} does not have")
    return cls(**values)
