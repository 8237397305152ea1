"""Checks of a caller's arguments: a ValueError names it, what is allowed, and a likely typo."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import MISSING, fields
from typing import TypeGuard, TypeVar

Config = TypeVar("Config")


def is_integer(value: object) -> TypeGuard[int]:
    """An int of Python: neither True nor a tensor or array that holds one."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_bool(name: str, value: object) -> None:
    """ValueError for anything but True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: give True or False")


def as_list(name: str, value: object, wanted: str) -> list[object]:
    """The items of an ordered collection; ValueError for text, bytes, mappings, sets, scalars."""
    is_other = isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set)
    try:
        if not is_other and isinstance(value, Iterable):
            return list(value)
    except TypeError:  # a tensor or array without dimensions is Iterable, but iter() raises
        pass
    raise ValueError(f"{name}={value!r}: give {wanted}")


def refuse_unknown(owner: str, given: Iterable[object], allowed: Collection[str]) -> None:
    """ValueError if any of the names in `given` is not allowed."""
    unknown = sorted(str(name) for name in given if name not in allowed)
    if not unknown:
        return
    matches = (difflib.get_close_matches(name, list(allowed), n=1) for name in unknown)
    close = next(filter(None, matches), None)
    hint = f"; did you mean {close[0]}?" if close else ""
    names = ", ".join(sorted(allowed))
    raise ValueError(f"{owner} does not take {', '.join(unknown)}{hint} (allowed: {names})")


def from_mapping(cls: type[Config], values: Mapping[str, object]) -> Config:
    """Build a dataclass from a dict, refusing unknown and missing keys by name."""
    wanted = fields(cls)  # type: ignore[arg-type]
    refuse_unknown(cls.__name__, values, [field.name for field in wanted])
    missing = [
        each.name
        for each in wanted
        if each.default is each.default_factory is MISSING and each.name not in values
    ]
    if missing:
        names = ", ".join(missing)
        raise ValueError(f"{cls.__name__} needs {names}, which {dict(values)!r} does not have")
    return cls(**values)
