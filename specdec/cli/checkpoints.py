"""`specdec inspect`, `load`, `convert` and `widen`: what a checkpoint is, read and rewritten."""

import dataclasses
import json
import shutil
import sys
import time

import torch
from torch import Tensor

from specdec.cli.before_torch import source_directory
from specdec.cli.choices import ConvertOptions, InspectOptions, LoadOptions, WidenOptions
from specdec.start.device import device_of
from specdec.start.locate import locate
from weights.config import TargetConfig
from weights.convert import convert
from weights.inspect import Inspection, inspect_checkpoint
from weights.load import load_eagle, load_target
from weights.report import BindingReport
from weights.widen import SHAPES, widen_pair


def run_inspect(options: InspectOptions) -> None:
    """Print the inspection; exit code 1 if it found problems."""
    config = None if options.target is None else _target_config(options.target)
    inspection = inspect_checkpoint(locate(options.checkpoint, "checkpoint"), config)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(_as_json(inspection) if options.json else inspection.text(width))
    if inspection.problems:
        raise SystemExit(1)


def _target_config(name: str) -> TargetConfig:
    inspection = inspect_checkpoint(locate(name, "target"))
    if not isinstance(inspection.config, TargetConfig):
        report = inspection.report
        raise ValueError(f"--target {name}: {report.role} of format {report.format}, no target")
    return inspection.config


def _as_json(inspection: Inspection) -> str:
    report = inspection.report
    names = ("name", "dtype", "shape", "num_bytes")
    tensors = [
        {name: getattr(entry, name) for name in names} | {"file": entry.file.name}
        for entry in inspection.tensors
    ]
    ignored = [{"name": name, "reason": reason} for name, reason in report.ignored]
    found = {**dataclasses.asdict(report), "ignored": ignored, "problems": inspection.problems}
    return json.dumps({**found, "tensors": tensors}, default=_plain)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, frozenset) else str(value)


def run_load(options: LoadOptions) -> None:
    """Load the target and the draft. dtype auto: as the target is stored."""
    where = device_of(options.device)
    target = locate(options.target, "target")
    draft = None if options.draft is None else locate(options.draft, "draft")
    start = time.perf_counter()
    wanted = None if options.dtype == "auto" else getattr(torch, options.dtype)
    loaded = load_target(target, dtype=wanted, device=where)
    _show(loaded.report, loaded.tensors, time.perf_counter() - start)
    if draft is not None:
        start = time.perf_counter()
        eagle = load_eagle(draft, loaded, device=where)
        _show(eagle.report, eagle.tensors, time.perf_counter() - start)


def _show(report: BindingReport, tensors: dict[str, Tensor], seconds: float) -> None:
    size = sum(tensor.nbytes for tensor in tensors.values())
    numbers = sum(tensor.numel() for tensor in tensors.values())
    print(report)
    print(
        f"  loaded: {len(tensors)} tensors, {numbers / 1e6:.1f} M numbers, {size / 1e6:.1f} MB "
        f"in {seconds:.2f} s ({size / 1e6 / seconds:.0f} MB/s)\n"
    )


def run_convert(options: ConvertOptions) -> None:
    """Convert, and say what was written."""
    result = convert(options.directory)
    print(f"{result}: {result.stat().st_size:,} bytes")


def run_widen(options: WidenOptions) -> None:
    """Write the pair of a directory at a shape, and say how to use it."""
    out, source = options.directory, source_directory(options.source)
    widen_pair(source, out, SHAPES[options.shape], options.dtype, device_of(options.device))
    print(f"{out / 'target'}\n{out / 'eagle3'}\n{out / 'prompts.json'}")
