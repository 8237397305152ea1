"""What a checkpoint is, without loading it: format, every field with its source, the tensor table, what is wrong.

A draft without its target is read as far as it goes; fields that the target decides say so.
"""

from dataclasses import dataclass
from pathlib import Path

from weights.bind import check_binding, check_dtypes
from weights.config import EagleConfig, TargetConfig
from weights.draft.resolve import resolve_eagle
from weights.errors import CheckpointError, Problems, shown
from weights.fields import read_json_object
from weights.files.header import TensorEntry
from weights.files.reader import Reader
from weights.load import make_report, training_only
from weights.rename import TARGET_ROWS, rename
from weights.report import BindingReport, Log
from weights.shapes import eagle_shapes, target_shapes
from weights.target import resolve_target

OPEN = (
    "not checked without the target: taps, shapes of fc and embedding, vocabulary, d2t values, whether embedding and "
    "head are copies of its own"
)
MOST_OF_A_NAME = 200  # characters in the table
OF_THE_TARGET = (
    "fc",
    "input_norm",
    "embed_tokens",
)  # tensors whose shapes follow from the target's sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """str(inspection) prints all of it. config is None where a problem left it open."""

    report: BindingReport
    config: TargetConfig | EagleConfig | None
    tensors: tuple[TensorEntry, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        names = [shown(entry.name, MOST_OF_A_NAME) for entry in self.tensors]
        width = max(map(len, names), default=0)
        table = [
            _line(entry, f"{name:<{width}}")
            for entry, name in zip(self.tensors, names, strict=True)
        ]
        total = sum(entry.num_bytes for entry in self.tensors)
        wrong = [f"  problem: {problem}" for problem in self.problems]
        return "\n".join(
            [str(self.report), *wrong, f"{len(table)} tensors, {total:,} bytes", *table]
        )


def _line(entry: TensorEntry, name: str) -> str:
    shape = str(list(entry.shape))
    return f"  {name}  {entry.dtype:<5} {shape:<16} {entry.num_bytes:>12,}  {shown(entry.file.name, MOST_OF_A_NAME)}"


def inspect_checkpoint(directory: Path, target: TargetConfig | None = None) -> Inspection:
    """Resolve everything that headers and config.json tell; raises CheckpointError only for unreadable headers.

    target: the config that a draft is meant for, if known
    """
    reader, log, problems = Reader(directory), Log(), Problems(directory)
    role = "draft" if is_draft(reader) else "target"
    ignored: dict[str, str] = {}
    try:
        config = (
            _draft(reader, target, log, problems, ignored)
            if role == "draft"
            else _target(reader, log, problems, ignored)
        )
    except CheckpointError:
        config = None
    format = (
        "unknown"
        if config is None
        else config.format
        if isinstance(config, EagleConfig)
        else config.model_type
    )
    return Inspection(
        report=make_report(directory, role, format, log, ignored),
        config=config,
        tensors=tuple(reader.entries.values()),
        problems=tuple(problems.lines),
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


def _target(reader: Reader, log: Log, problems: Problems, ignored: dict[str, str]) -> TargetConfig:
    renamed = rename(reader.entries, TARGET_ROWS, problems)
    ignored.update(renamed.ignored)
    held = {name: reader.entries[old] for name, old in renamed.names.items()}
    check_dtypes(held, problems)
    config = resolve_target(reader, log, problems)
    tied = {"lm_head.weight"} if config.has_tied_head else set()
    check_binding(
        target_shapes(config),
        {name: entry for name, entry in held.items() if name not in tied},
        problems,
    )
    return config


def _draft(
    reader: Reader,
    target: TargetConfig | None,
    log: Log,
    problems: Problems,
    ignored: dict[str, str],
) -> EagleConfig:
    resolution = resolve_eagle(reader, target, None, log, problems)
    ignored.update(resolution.ignored | training_only(resolution.held))
    wanted = eagle_shapes(resolution.config)
    held = {name: entry for name, entry in resolution.held.items() if name != "t2d"}
    if target is None:
        log.note(OPEN)
        wanted = {
            name: shape for name, shape in wanted.items() if not name.startswith(OF_THE_TARGET)
        }
        held = {name: entry for name, entry in held.items() if not name.startswith(OF_THE_TARGET)}
    check_binding(wanted, held, problems)
    return resolution.config
