"""Numbers and switches that tensors and config.json both state: tensors decide numbers.

A draft whose config disagrees with its tensors is refused; numbers that published configs are known
to state wrongly become a note. A single tensor that is outvoted is reported as misshapen later.
"""

from collections import Counter
from dataclasses import dataclass

from weights.config import TargetConfig
from weights.draft.layouts import Layout
from weights.fields import Fields, check_size
from weights.files.header import TensorEntry
from weights.report import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What a draft is resolved from, and the log of decisions."""

    held: dict[str, TensorEntry]  # by the names of this package
    fields: Fields
    target: TargetConfig | None  # None if a draft is inspected alone: what depends on it stays open
    aux_layers: tuple[int, ...] | None  # the caller's boundaries, instead of the checkpoint's
    log: Log

    def has(self, name: str) -> bool:
        return name in self.held

    def presence(self, name: str) -> str:
        return f"{name} is {'there' if name in self.held else 'absent'}"

    def where(self, key: str, *names: str) -> str:
        """For problems: the file of the first tensor there is, else config.json and its key."""
        held = next((self.held[name] for name in names if name in self.held), None)
        return f"{self.fields.file}: {key}" if held is None else held.where

    def dim(self, name: str, axis: int) -> int | None:
        """The length of one axis; None if there is no such tensor or axis."""
        shape = self.held[name].shape if name in self.held else ()
        return shape[axis] if axis < len(shape) else None

    def dims(self, axes: dict[str, int]) -> dict[str, int]:
        """{tensor: axis} -> {tensor: length of that axis}, for those that have it."""
        sizes = {name: self.dim(name, axis) for name, axis in axes.items()}
        return {name: size for name, size in sizes.items() if size is not None}

    def number(
        self, key: str, sizes: dict[str, int], default: int | None = None, note_only: bool = False
    ) -> int:
        """The number that most of `sizes` (tensor: number) and config.json[key] agree on.

        default:   if neither states it; None makes that a problem
        note_only: published configs are known to be wrong, so a note replaces the problem
        """
        written = self.fields.find(int, key)
        if not sizes and written is None:
            if default is None and key not in self.fields:
                self.fields.add_problem(f"missing {key}, and no tensor shows it", fatal=True)
            self.log.add(key, default, "default")
            return default or 0
        votes = ([] if written is None else [written]) + list(sizes.values())
        value = Counter(votes).most_common(1)[0][0]
        tensor = next((name for name, size in sizes.items() if size == value), None)
        self.log.add(key, value, f"shape of {tensor}" if tensor else self.fields.source(key))
        if tensor:
            source = f"{self.held[tensor].file.name}: shape of {tensor}"
            check_size(key, value, source, self.fields.problems)
        if written is not None and written != value:
            line = f"{self.fields.source(key)} is {written}, the shape of {tensor} says {value}"
            if note_only:
                self.log.note(f"{line}: the tensors decide")
            else:
                self.fields.problems.add(line)
        return value

    def flag(self, field: str, key: str | None, name: str, default: bool | None = None) -> bool:
        """A switch with a tensor: config.json decides, then `default`, then the tensor's presence.

        A tensor that the decision needs and lacks, or has and does not need, is reported later.
        """
        found = self.has(name)
        written = self.fields.find(bool, key) if key else None
        if written is not None and key is not None:
            value, source = written, self.fields.source(key)
        elif default is None or default == found:
            value, source = found, self.presence(name)
        else:
            value, source = default, "default"
        self.log.add(field, value, source)
        return value

    def owns(self, field: str, name: str) -> bool:
        """Whether the draft has this tensor, or takes the target's."""
        found = self.has(name)
        self.log.add(field, found, self.presence(name) + ("" if found else ": the target's"))
        return found

    def ignore(self, why: str, *keys: str) -> None:
        """Note each key that asks for what this draft lacks."""
        for key in keys:
            if self.fields.values.get(key):
                self.log.note(f"{self.fields.source(key)} is ignored: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSources(Sources):
    """Those of an EAGLE draft, with what its format leaves unsaid."""

    layout: Layout

    @classmethod
    def of(cls, sources: Sources, layout: Layout) -> "EagleSources":
        return cls(
            held=sources.held,
            fields=sources.fields,
            target=sources.target,
            aux_layers=sources.aux_layers,
            log=sources.log,
            layout=layout,
        )
