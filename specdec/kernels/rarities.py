"""Kernels that are not compiled ahead, since hardly any step needs them: the only ones.

A step that does waits for the compiler once on each machine. Such a compilation is counted apart
and logged at level "info"; any other kernel that is compiled while requests wait is a fault of
start/compile_ahead.py. Today every kernel is compiled ahead.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rarity:
    """constants: the arguments of the kernel, known to the compiler, that tell this variant."""

    kernel: str
    constants: Mapping[str, object]


RARITIES: tuple[Rarity, ...] = ()


def is_rare(kernel: str, constants: Mapping[str, object]) -> bool:
    """Whether a variant of this kernel, compiled for these arguments, is on the list."""
    return any(
        rarity.kernel == kernel and rarity.constants.items() <= constants.items()
        for rarity in RARITIES
    )
