"""Kernels: one file each, with its public function, its Triton kernel and its torch twin.

Here is the project's one device check. Triton is imported where it can run: with a CUDA device, or
in its interpreter (TRITON_INTERPRET=1, for tests). Elsewhere `jit` leaves the kernels as they are
and `use_triton` is never true.
"""

import os
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = [
    "HAS_TRITON",
    "INTERPRET",
    "TensorDescriptor",
    "jit",
    "launch_options",
    "next_power_of_2",
    "pick",
    "tl",
    "triton",
    "use_triton",
]

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = INTERPRET or torch.cuda.is_available()

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    jit = triton.jit
else:
    triton, TensorDescriptor = None, None
    tl = SimpleNamespace(constexpr=None)  # signatures of kernels name tl.constexpr

    def jit(kernel: Callable[..., object]) -> Callable[..., object]:
        """Leave the kernel as it is; it is never launched."""
        return kernel


P = ParamSpec("P")
R = TypeVar("R")


def use_triton(tensor: Tensor) -> bool:
    """Whether a call on this tensor goes to the Triton kernel; else to the torch twin."""
    return tensor.is_cuda


def pick(tensor: Tensor, launch: Callable[P, R], twin: Callable[P, R]) -> Callable[P, R]:
    """What computes on this tensor: the launcher of a Triton kernel, or its torch twin."""
    return launch if use_triton(tensor) else twin


def launch_options(tensor: Tensor) -> dict[str, bool]:
    """Whether kernels on this tensor's device overlap (overlap.py): Hopper GPUs and later do."""
    if not tensor.is_cuda:
        return {"PDL": False}
    has_pdl = _capability(tensor.device.index or 0)[0] >= 9
    return {"PDL": has_pdl, "launch_pdl": has_pdl}


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
