"""Kernels that are not compiled ahead, since hardly any step needs them: the only ones.

A step that does waits for the compiler once on each machine. Such a compilation is counted apart
and logged at level "info"; any other kernel that is compiled while requests wait is a fault of
start/compile_ahead.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rarity:
    """constants: the arguments of the kernel, known to the compiler, that tell this variant."""

    kernel: str
    constants: Mapping[str, object]


# A narrow query tile in a chunk without splits: 32 requests or more, the longest with 4 or 5 rows
# at 3 query heads for each kv head, or with 3 rows at 5, where fewer rows would still be split.
_CHUNK = {"IS_SPLIT": False, "IS_UNIFORM": False}
RARITIES = (
    Rarity(kernel="_paged_attention_kernel", constants={"GROUP": 4, "TOKENS": 4, **_CHUNK}),
    Rarity(kernel="_paged_attention_kernel", constants={"GROUP": 8, "TOKENS": 2, **_CHUNK}),
)


def is_rare(kernel: str, constants: Mapping[str, object]) -> bool:
    """Whether a variant of this kernel, compiled for these arguments, is on the list."""
    return any(
        rarity.kernel == kernel and rarity.constants.items() <= constants.items()
        for rarity in RARITIES
    )
