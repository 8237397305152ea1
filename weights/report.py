"""What a load decided, field by field, with sources: is this draft bound as it was trained?"""

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weights.config import RopeConfig
from weights.errors import shown
from weights.fields import Fields

OTHER_TAPS = "taps read as"  # begins the note of what a draft's ids would mean otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    field: str
    value: object
    source: str  # "config.json: rope_theta", "shape of fc.weight", "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingReport:
    """str(report) is its text; `fields` and `notes` are what it says."""

    directory: Path
    role: str  # "target" or "draft"
    format: str
    fields: tuple[Resolved, ...]
    notes: tuple[str, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()  # (name in the file, why it is harmless)

    def __str__(self) -> str:
        longest = max((len(row.field) for row in self.fields), default=0)
        values = [_show(row.value) for row in self.fields]
        value_width = min(max((len(value) for value in values), default=0), 40)
        lines = [f"{self.role} {self.directory}: {self.format}"]
        for row, value in zip(self.fields, values, strict=True):
            lines.append(f"  {row.field:<{longest}}  {value:<{value_width}}  {row.source}")
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  ignored: {name} ({why})" for name, why in self.ignored]
        return "\n".join(map(shown, lines))


def wrapped(lines: Sequence[str], width: int | None) -> list[str]:
    """Break lines of over `width` columns between words; they go on four columns further in."""
    if width is None:
        return list(lines)
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    found: list[str] = []
    for line in lines:
        wrapper.subsequent_indent = " " * (len(line) - len(line.lstrip()) + 4)
        found += [line] if len(line) <= width else wrapper.wrap(line)
    return found


class Log:
    """Collects resolved fields, notes and ignored tensors while a checkpoint is resolved."""

    def __init__(self) -> None:
        self.rows: dict[str, Resolved] = {}
        self.notes: list[str] = []
        self.ignored: dict[str, str] = {}  # name in the file -> why it is harmless

    def add(self, field: str, value: object, source: str) -> None:
        self.rows[field] = Resolved(field=field, value=value, source=source)

    def add_read(self, fields: Fields, config: object, **keys: str) -> None:
        """Add fields of `config` that were read from config.json; keys: field=key there."""
        for field, key in keys.items():
            self.add(field, getattr(config, field), fields.source(key))

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)


def _show(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, RopeConfig):
        plain = dataclasses.asdict(RopeConfig())
        rope = dataclasses.asdict(value)
        keys = [key for key in rope if key == "theta" or rope[key] != plain[key]]
        return ", ".join([value.kind, *(f"{key}={rope[key]}" for key in keys)])
    return str(value)
