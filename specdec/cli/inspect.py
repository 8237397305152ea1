"""`specdec inspect`: what a checkpoint says about itself, from config.json and headers alone."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

from specdec.start.locate import locate
from weights.config import TargetConfig
from weights.inspect import Inspection, inspect_checkpoint


def run_inspect(directory: Path, target: str | None, as_json: bool) -> None:
    """Print the inspection; exit code 1 if it found problems."""
    config = None if target is None else _target_config(target)
    inspection = inspect_checkpoint(directory, config)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(json.dumps(inspection_as_dict(inspection)) if as_json else inspection.text(width))
    if inspection.problems:
        raise SystemExit(1)


def _target_config(name: str) -> TargetConfig:
    inspection = inspect_checkpoint(locate(name, "target"))
    if not isinstance(inspection.config, TargetConfig):
        report = inspection.report
        raise ValueError(f"--target {name}: {report.role} of format {report.format}, no target")
    return inspection.config


def inspection_as_dict(inspection: Inspection) -> dict[str, object]:
    """Return the inspection in plain types."""
    report = inspection.report
    return {
        "directory": str(report.directory),
        "role": report.role,
        "format": report.format,
        "fields": [
            {"field": row.field, "value": _plain(row.value), "source": row.source}
            for row in report.fields
        ],
        "notes": list(report.notes),
        "ignored": [{"name": name, "reason": reason} for name, reason in report.ignored],
        "problems": list(inspection.problems),
        "tensors": [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "num_bytes": entry.num_bytes,
                "file": entry.file.name,
            }
            for entry in inspection.tensors
        ],
    }


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple | frozenset) else value
