"""Errors for arguments that nobody takes: ValueErrors that name the argument, what is allowed, and the likely typo."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import TypeVar

Config = TypeVar("Config")


def refuse_unknown(owner: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """ValueError if any of the names in `given` is not allowed."""
    unknown = sorted(set(given) - set(allowed))
    if not unknown:
        return
    close = difflib.get_close_matches(unknown[0], list(allowed), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"{owner} does not take {', '.join(unknown)}{hint} (allowed: {', '.join(sorted(allowed))})")


def from_mapping(cls: type[Config], values: Mapping[str, object]) -> Config:
    """Build a dataclass from a dict, refusing unknown and missing keys by name."""
    wanted = fields(cls)  # type: ignore[arg-type]
    refuse_unknown(cls.__name__, values, [field.name for field in wanted])
    needed = [field.name for field in wanted if field.default is MISSING and field.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"{cls.__name__} needs {', '.join(missing)}, which {dict(values)!r} does not have")
    return cls(**values)
