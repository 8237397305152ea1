"""What a checkpoint is, without loading it: format, fields with sources, tensor table, problems.

A draft without its target is read as far as it goes; fields that the target decides say so.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weights.config import TargetConfig
from weights.draft.config import DraftConfig
from weights.draft.resolve import resolve_draft
from weights.errors import CheckpointError, Problems, listed, shown
from weights.fields import read_json_object
from weights.files.header import TensorEntry
from weights.files.reader import Reader
from weights.load import bind_target, make_report
from weights.report import BindingReport, Log, wrapped
from weights.shapes import check_binding, draft_shapes

OPEN = (
    "not checked without the target: taps, shapes of fc and embedding, vocabulary, d2t values, "
    "whether embedding and head are copies of its own"
)
MOST_OF_A_NAME = 200  # characters in the table
NUMBER = "{}"  # in the place of one in a name
# their shapes follow from the target's sizes
OF_THE_TARGET = ("fc", "input_norm", "embed_tokens", "mask_hidden")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """str(inspection) is all of it as text. config is None if a problem left it open."""

    report: BindingReport
    config: TargetConfig | DraftConfig | None
    tensors: tuple[TensorEntry, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """In lines of at most `width` columns, where words allow it; None: as long as they are.

        Tensors that differ by the numbers in their names alone share a line.
        """
        lines = str(self.report).splitlines()
        lines += [f"  problem: {problem}" for problem in self.problems]
        total = sum(entry.num_bytes for entry in self.tensors)
        lines.append(f"{len(self.tensors)} tensors, {total:,} bytes")
        groups = _groups(self.tensors)
        longest = max((len(name) for name, _ in groups), default=0)
        lines += [f"  {name:<{longest}}  {_row(entries)}" for name, entries in groups]
        return "\n".join(wrapped(lines, width))


def _row(entries: Sequence[TensorEntry]) -> str:
    first = entries[0]
    count = f"{len(entries)} x" if len(entries) > 1 else ""
    total = sum(entry.num_bytes for entry in entries)
    names = {entry.file.name for entry in entries}
    files = f"{len(names)} files" if len(names) > 1 else shown(names.pop(), MOST_OF_A_NAME)
    return f"{count:>6} {first.dtype:<7} {list(first.shape)!s:<16} {total:>14,}  {files}"


def _groups(tensors: Sequence[TensorEntry]) -> list[tuple[str, list[TensorEntry]]]:
    """Tensors of one dtype and shape whose names differ by a number, with the name of all.

    They are in the order of the first of each.
    """
    alike: dict[tuple[object, ...], list[TensorEntry]] = {}
    for entry in tensors:
        pattern = tuple(NUMBER if part.isdecimal() else part for part in entry.name.split("."))
        alike.setdefault((pattern, entry.dtype, entry.shape), []).append(entry)
    groups: list[tuple[str, list[TensorEntry]]] = []
    for entries in alike.values():
        name = _name_of_all([entry.name for entry in entries])
        groups += [(each.name, [each]) for each in entries] if name is None else [(name, entries)]
    return [(shown(name, MOST_OF_A_NAME), entries) for name, entries in groups]


def _name_of_all(names: Sequence[str]) -> str | None:
    """model.layers.{0..2,5}.mlp.up_proj.weight; None where some combinations are missing."""
    parts = []
    num_named = 1
    for values in zip(*(name.split(".") for name in names), strict=True):
        if len(set(values)) == 1:
            parts.append(values[0])
            continue
        numbers = sorted(set(map(int, values)))
        num_named *= len(numbers)
        parts.append(f"{{{_runs(numbers)}}}")
    return ".".join(parts) if num_named == len(names) else None


def _runs(numbers: Sequence[int]) -> str:
    """0..2,4..5 for these, in order."""
    starts = [i for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1] + 1]
    ends = [*starts[1:], len(numbers)]
    runs = (numbers[a:b] for a, b in zip(starts, ends, strict=True))
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def inspect_checkpoint(directory: Path, target: TargetConfig | None = None) -> Inspection:
    """Resolve what headers and config.json say; CheckpointError only for unreadable headers."""
    reader = Reader(directory)
    log = Log()
    role = "draft" if is_draft(reader) else "target"
    config: TargetConfig | DraftConfig | None = None
    with suppress(CheckpointError):  # its lines are in the reader's problems
        config = _draft(reader, target, log) if role == "draft" else bind_target(reader, log)[0]
    format = "unknown"
    if config is not None:
        format = config.model_type if isinstance(config, TargetConfig) else config.format
    return Inspection(
        report=make_report(directory, role, format, log),
        config=config,
        tensors=tuple(reader.entries.values()),
        problems=tuple(listed(reader.problems.lines)),
    )


def is_draft(reader: Reader) -> bool:
    """A draft fuses features, or says so in its config; no target has fc.weight or hidden_norm."""
    raw = read_json_object(reader.directory / "config.json", Problems(reader.directory))
    names = [name.split(".") for name in reader.entries]
    return (
        "speculators_model_type" in raw
        or "eagle_config" in raw
        or any(name[-2:] in (["fc", "weight"], ["hidden_norm", "weight"]) for name in names)
    )


def _draft(reader: Reader, target: TargetConfig | None, log: Log) -> DraftConfig:
    resolution = resolve_draft(reader, target, None, log)
    wanted = draft_shapes(resolution.config)
    held = resolution.bound
    if target is None:
        log.note(OPEN)
        wanted = {name: wanted[name] for name in wanted if not name.startswith(OF_THE_TARGET)}
        held = {name: held[name] for name in held if not name.startswith(OF_THE_TARGET)}
    check_binding(wanted, held, reader.problems)
    return resolution.config
