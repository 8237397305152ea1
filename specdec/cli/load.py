"""`specdec load`: read every tensor, print what each field was bound to, and the time it took."""

import time

import torch
from torch import Tensor

from specdec.config import EngineConfig
from specdec.start.device import device_of
from specdec.start.locate import locate
from weights.load import load_eagle, load_target
from weights.report import BindingReport


def run_load(target: str, draft: str | None, dtype: str, device: str) -> None:
    """Load the target and the draft. dtype auto: as the target is stored."""
    config = EngineConfig(dtype=dtype, device=device)
    where = device_of(config.device)
    directories = [locate(target, "target")]
    directories += [] if draft is None else [locate(draft, "draft")]
    start = time.perf_counter()
    wanted = None if dtype == "auto" else getattr(torch, dtype)
    loaded = load_target(directories[0], dtype=wanted, device=where)
    _show(loaded.report, loaded.tensors, time.perf_counter() - start)
    for directory in directories[1:]:
        start = time.perf_counter()
        eagle = load_eagle(directory, loaded, device=where)
        _show(eagle.report, eagle.tensors, time.perf_counter() - start)


def _show(report: BindingReport, tensors: dict[str, Tensor], seconds: float) -> None:
    """The binding report, then size and time."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    numbers = sum(tensor.numel() for tensor in tensors.values())
    print(report)
    print(
        f"  loaded: {len(tensors)} tensors, {numbers / 1e6:.1f} M numbers, {size / 1e6:.1f} MB "
        f"in {seconds:.2f} s ({size / 1e6 / seconds:.0f} MB/s)\n"
    )
