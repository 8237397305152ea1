"""Numbers and switches that both tensors and config.json tell: tensors decide numbers, config.json confirms them.

A head whose config disagrees with its own tensors is refused, except for numbers that published heads are known to
state wrongly; those become a note. A single tensor that is outvoted stays outvoted and is reported as misshapen later.
"""

from collections import Counter
from dataclasses import dataclass

from weights.errors import Problems
from weights.fields import Fields, check_size
from weights.files.header import TensorEntry
from weights.report import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
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

    def dims(self, axes: dict[str, int]) -> dict[str, int | None]:
        """{tensor: axis} -> {tensor: length of that axis}."""
        return {name: self.dim(name, axis) for name, axis in axes.items()}

    def number(
        self,
        field: str,
        key: str,
        sizes: dict[str, int | None],
        default: int | None = None,
        is_unreliable: bool = False,
    ) -> int:
        """The number that most of `sizes` (what: value) and config.json[key] agree on.

        default: for when nobody says anything; None makes that a problem
        is_unreliable: published configs are known to be wrong here, so a note replaces the problem
        """
        shapes = {what: value for what, value in sizes.items() if value is not None}
        written = self.fields.find(int, key)
        if not shapes and written is None:
            return self._silent(field, key, default)
        votes = ([] if written is None else [written]) + list(shapes.values())
        value = Counter(votes).most_common(1)[0][0]
        tensor = next((what for what, seen in shapes.items() if seen == value), None)
        self.log.add(field, value, f"shape of {tensor}" if tensor else self.fields.source(key))
        if tensor:
            check_size(
                key, value, f"{self.held[tensor].file.name}: shape of {tensor}", self.problems
            )
        if written is not None and written != value:
            self._disagree(
                f"{self.fields.source(key)} is {written}, the shape of {tensor} says {value}",
                is_unreliable,
            )
        return value

    def flag(self, field: str, key: str | None, name: str, default: bool | None = None) -> bool:
        """A switch with a tensor: config.json decides, then `default`, then whether the tensor is there.

        A tensor that the decision needs and lacks, or has and does not need, is reported with the names later.
        """
        found = self.has(name)
        presence = f"{name} is {'there' if found else 'absent'}"
        written = self.fields.find(bool, key) if key else None
        decided = written if written is not None else default
        value = found if decided is None else decided
        source = presence if decided is None or found == value else "default"
        self.log.add(
            field, value, source if written is None or key is None else self.fields.source(key)
        )
        return value

    def ignore(self, why: str, *keys: str) -> None:
        """A note for each key that asks for what this draft has not."""
        for key in keys:
            if self.fields.values.get(key):
                self.log.note(f"{self.fields.source(key)} is ignored: {why}")

    def _silent(self, field: str, key: str, default: int | None) -> int:
        if default is None and key not in self.fields:
            self.problems.add(
                f"{self.fields.file}: missing {key}, and no tensor tells it", fatal=True
            )
        self.log.add(field, default, "default")
        return default or 0

    def _disagree(self, line: str, is_unreliable: bool) -> None:
        if is_unreliable:
            self.log.note(f"{line}: the tensors decide")
        else:
            self.problems.add(line)
