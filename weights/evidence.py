"""Numbers that both tensors and config.json tell: tensors decide, by majority, and config.json confirms.

A head whose config disagrees with its own tensors is refused, except for numbers that published heads are known to state
wrongly; those become a note. A single tensor that is outvoted stays outvoted and is reported as misshapen later.
"""

from collections import Counter
from dataclasses import dataclass

from weights.errors import Problems
from weights.fields import Fields
from weights.header import TensorEntry
from weights.report import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A checkpoint's tensors by the names used here, its config, and where decisions are written down."""

    held: dict[str, TensorEntry]
    fields: Fields
    log: Log
    problems: Problems

    def has(self, *names: str) -> bool:
        return any(name in self.held for name in names)

    def dim(self, name: str, axis: int) -> int | None:
        """The length of one axis; None if there is no such tensor or axis."""
        shape = self.held[name].shape if name in self.held else ()
        return shape[axis] if axis < len(shape) else None

    def number(
        self, field: str, key: str, places: dict[str, int | None], default: int | None = None, may_lie: bool = False
    ) -> int:
        """The number that most of `places` (what: value) and config.json[key] agree on.

        default: for when nobody says anything; None makes that a problem
        may_lie: published configs are known to be wrong here, so a note replaces the problem
        """
        told = {what: value for what, value in places.items() if value is not None}
        written = self.fields.find(int, key)
        if not told and written is None:
            return self._silent(field, key, default)
        ballots = ([written] if written is not None else []) + list(told.values())
        value = Counter(ballots).most_common(1)[0][0]
        witness = next((what for what, seen in told.items() if seen == value), None)
        self.log.add(field, value, f"shape of {witness}" if witness else self.fields.source(key))
        if written is not None and written != value:
            self._disagree(f"{self.fields.source(key)} is {written}, {witness} says {value}", may_lie)
        return value

    def flag(self, field: str, key: str, names: tuple[str, ...], default: bool = False) -> bool:
        """True if one of the tensors is there or config.json asks for it (a tensor it lacks is then listed as missing)."""
        written = self.fields.find(bool, key)
        if self.has(*names):
            self.log.add(field, True, f"{names[0]} is there")
            return True
        value = default if written is None else written
        self.log.add(
            field,
            value,
            self.fields.source(key) if written is not None else f"{names[0]} is absent" if not value else "default",
        )
        return value

    def _silent(self, field: str, key: str, default: int | None) -> int:
        if default is None:
            self.problems.add(f"{self.fields.file}: missing {key}, and no tensor tells it")
        self.log.add(field, default, "default")
        return default or 0

    def _disagree(self, line: str, may_lie: bool) -> None:
        if may_lie:
            self.log.note(f"{line}: the tensors decide")
        else:
            self.problems.add(line)
