"""Checks of what a caller gives: a ValueError names the argument, what is allowed, and the likely typo."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import MISSING, fields
from typing import TypeGuard, TypeVar

Config = TypeVar("Config")


def is_integer(value: object) -> TypeGuard[int]:
    """Python's own: True is no number, and neither is a tensor or an array that holds one."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_bool(name: str, value: object) -> None:
    """ValueError for anything but True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: give True or False")


def as_list(name: str, value: object, wanted: str) -> list[object]:
    """The items of anything that has an order; ValueError for text, bytes, mappings, sets and what has no items."""
    is_other = isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set)
    try:
        if not is_other and isinstance(value, Iterable):
            return list(value)
    except (
        TypeError
    ):  # a tensor or array without dimensions has no items, but says so only when asked for them
        pass
    raise ValueError(f"{name}={value!r}: give {wanted}")


def refuse_unknown(owner: str, given: Iterable[object], allowed: Collection[str]) -> None:
    """ValueError if any of the names in `given` is not allowed."""
    unknown = sorted(str(name) for name in given if name not in allowed)
    if not unknown:
        return
    close = [
        match for name in unknown for match in difflib.get_close_matches(name, list(allowed), n=1)
    ]
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(
        f"{owner} does not take {', '.join(unknown)}{hint} (allowed: {', '.join(sorted(allowed))})"
    )


def from_mapping(cls: type[Config], values: Mapping[str, object]) -> Config:
    """Build a dataclass from a dict, refusing unknown and missing keys by name."""
    wanted = fields(cls)  # type: ignore[arg-type]
    refuse_unknown(cls.__name__, values, [field.name for field in wanted])
    needed = [
        field.name
        for field in wanted
        if field.default is MISSING and field.default_factory is MISSING
    ]
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(
            f"{cls.__name__} needs {', '.join(missing)}, which {dict(values)!r} does not have"
        )
    return cls(**values)
