"""One line of the log: where the tiles of an engine's products come from."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from specdec.kernels.tables import user_file
from specdec.kernels.tile_shapes import TABLE_DTYPES, Product
from specdec.kernels.tiles import gpu_name, source_of

logger = logging.getLogger("specdec")


def log_tiles(products: Sequence[Product], device: torch.device) -> None:
    """Log where tiles come from; a CPU has none."""
    if device.type == "cuda":
        logger.info("%s", sources_line(products, gpu_name(device)))


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
