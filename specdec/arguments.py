"""Errors for arguments that nobody takes: ValueErrors that name the argument, what is allowed, and the likely typo."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
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
    """Build a dataclass from a dict, refusing unknown keys by name."""
    refuse_unknown(cls.__name__, values, [field.name for field in fields(cls)])  # type: ignore[arg-type]
    return cls(**values)
