"""The device and dtype that an engine runs on, and where the tiles of its products come from."""

import gc
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from specdec.kernels.tables import user_file
from specdec.kernels.tile_shapes import TABLE_DTYPES, Product
from specdec.kernels.tiles import gpu_name, source_of

logger = logging.getLogger("specdec")
threads_logger = logging.getLogger("specdec.threads")
# other names of vLLM
DTYPES = {"half": torch.float16, "float": torch.float32}


@cache
def advise_threads(device: torch.device) -> None:
    """Log how to choose the number of threads, which is the process's own, once in a process."""
    count = torch.get_num_threads()
    if device.type == "cpu" and count > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads_logger.warning(
            "torch runs %d threads; a small model is often faster with one, on a busy machine by "
            "far: try OMP_NUM_THREADS=1 or torch.set_num_threads(1)",
            count,
        )


def note_gpu_memory(share: float | None, device: torch.device) -> None:
    """Scripts give gpu_memory_utilization; say that a CPU has no use for it."""
    if share is not None:
        logger.warning("gpu_memory_utilization=%g has no effect on device %s", share, device)


def device_of(name: object) -> torch.device:
    """Find the device of a name; "auto": a GPU if there is one.

    ValueError if torch cannot use it.
    """
    assert isinstance(name, str | torch.device), type(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    allowed = f"device={name!r}: give auto, cpu, cuda or cuda:N"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(allowed) from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ValueError(allowed)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: torch sees no CUDA device here; give cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device={name!r}: torch sees {count} CUDA devices here")
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype | None:
    """Find the dtype to load weights in; None: as stored. "auto" is float32 on the CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    dtype = DTYPES.get(name) or getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def device_memory(device: torch.device) -> int:
    """Count the bytes of a GPU, or of the host, in all."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def release_memory() -> None:
    """Give back memory of objects that nothing refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU


def log_tiles(products: Sequence[Product], experts: str | None, device: torch.device) -> None:
    """Log where tiles come from; a CPU has none. experts: see `experts_of`."""
    if device.type == "cuda":
        logger.info("%s", sources_line(products, gpu_name(device)))
        if experts is not None:
            logger.info("%s", experts_line(experts))


def experts_line(experts: str) -> str:
    """Say that a rule chooses the tiles of experts, which no table knows."""
    return f"tiles of the router and of {experts}: by rule, nothing measures them"


def sources_line(products: Sequence[Product], gpu: str) -> str:
    """Say how many products are measured, and where; which ones follow the rule."""
    sources = [source_of(product, gpu) for product in products]
    by_rule = [p for p, source in zip(products, sources, strict=True) if source == "rule"]
    parts = []
    if "shipped" in sources:
        parts.append(f"{sources.count('shipped')} shipped for {gpu}")
    if "user" in sources:
        parts.append(f"{sources.count('user')} from {home_relative(user_file())}")
    if by_rule:
        parts.append(f"{len(by_rule)} by rule ({', '.join(map(str, by_rule))})")
    line = f"tiles of {len(products)} products: {', '.join(parts)}"
    can_measure = any(product.dtype in TABLE_DTYPES for product in by_rule)
    return f"{line}; `specdec tune` measures them" if can_measure else line


def home_relative(file: Path) -> str:
    home = Path.home()
    return f"~/{file.relative_to(home)}" if file.is_relative_to(home) else str(file)
