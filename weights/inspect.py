"""What a checkpoint is, without loading it: format, fields with sources, tensor table, problems.

A draft without its target is read as far as it goes; fields that the target decides say so.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weights.bind import check_binding, check_dtypes
from weights.config import EagleConfig, TargetConfig
from weights.draft.resolve import resolve_eagle
from weights.errors import CheckpointError, Problems, shown
from weights.fields import read_json_object
from weights.files.header import TensorEntry
from weights.files.reader import Reader
from weights.load import make_report
from weights.rename import TARGET_ROWS, rename
from weights.report import BindingReport, Log
from weights.shapes import eagle_shapes, target_shapes
from weights.target import resolve_target

OPEN = (
    "not checked without the target: taps, shapes of fc and embedding, vocabulary, d2t values, "
    "whether embedding and head are copies of its own"
)
MOST_OF_A_NAME = 200  # characters in the table
OF_THE_TARGET = ("fc", "input_norm", "embed_tokens")  # their shapes follow from the target's sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """str(inspection) prints all of it. config is None if a problem left it open."""

    report: BindingReport
    config: TargetConfig | EagleConfig | None
    tensors: tuple[TensorEntry, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        names = [shown(entry.name, MOST_OF_A_NAME) for entry in self.tensors]
        width = max(map(len, names), default=0)
        lines = [str(self.report), *(f"  problem: {problem}" for problem in self.problems)]
        total = sum(entry.num_bytes for entry in self.tensors)
        lines.append(f"{len(names)} tensors, {total:,} bytes")
        for entry, name in zip(self.tensors, names, strict=True):
            shape = str(list(entry.shape))
            file = shown(entry.file.name, MOST_OF_A_NAME)
            columns = f"{entry.dtype:<5} {shape:<16} {entry.num_bytes:>12,}  {file}"
            lines.append(f"  {name:<{width}}  {columns}")
        return "\n".join(lines)


def inspect_checkpoint(directory: Path, target: TargetConfig | None = None) -> Inspection:
    """Resolve what headers and config.json say; CheckpointError only for unreadable headers."""
    reader = Reader(directory)
    log = Log()
    role = "draft" if is_draft(reader) else "target"
    config: TargetConfig | EagleConfig | None = None
    with suppress(CheckpointError):  # its lines are in the reader's problems
        config = _draft(reader, target, log) if role == "draft" else _target(reader, log)
    format = config.format if isinstance(config, EagleConfig) else "unknown"
    if isinstance(config, TargetConfig):
        format = config.model_type
    return Inspection(
        report=make_report(directory, role, format, log),
        config=config,
        tensors=tuple(reader.entries.values()),
        problems=tuple(reader.problems.lines),
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


def _target(reader: Reader, log: Log) -> TargetConfig:
    held = rename(reader, TARGET_ROWS, log)
    check_dtypes(held, reader.problems)
    config = resolve_target(reader, log)
    if config.has_tied_head:
        held.pop("lm_head.weight", None)
    check_binding(target_shapes(config), held, reader.problems)
    return config


def _draft(reader: Reader, target: TargetConfig | None, log: Log) -> EagleConfig:
    resolution = resolve_eagle(reader, target, None, log)
    wanted = eagle_shapes(resolution.config)
    held = resolution.bound
    if target is None:
        log.note(OPEN)
        wanted = {name: wanted[name] for name in wanted if not name.startswith(OF_THE_TARGET)}
        held = {name: held[name] for name in held if not name.startswith(OF_THE_TARGET)}
    check_binding(wanted, held, reader.problems)
    return resolution.config
