"""Kernels: one file each, with its public function, its Triton kernel and its torch twin.

Here is the project's one device check. Triton is imported where it can run: with a CUDA device, or
in its interpreter (TRITON_INTERPRET=1, for tests). Elsewhere `jit` leaves the kernels as they are
and `use_triton` is never true.
"""

import os
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = [
    "HAS_TRITON",
    "INTERPRET",
    "KERNEL_NAMES",
    "AsyncCompileMode",
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
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
    from triton.tools.tensor_descriptor import TensorDescriptor

    class Kernel(triton.JITFunction):  # type: ignore[misc]  # triton ships no types
        """Launches are requests to compile where the calling thread only compiles."""

        def __getitem__(self, grid):
            is_compiling = active_mode.get() is not None
            return partial(self.run, grid=grid, warmup=is_compiling)


else:
    triton, TensorDescriptor, AsyncCompileMode = None, None, None
    tl = SimpleNamespace(constexpr=None)  # signatures of kernels name tl.constexpr


KERNEL_NAMES: set[str] = set()  # of every `jit` function, as its file is imported
P = ParamSpec("P")
R = TypeVar("R")


def jit(kernel=None, *, varying=()):
    """A Triton kernel; without Triton the function as it is, which is never launched.

    varying: arguments that differ from call to call, so that one compiled kernel serves every value
    and every alignment of them.
    """
    if kernel is None:
        return partial(jit, varying=varying)
    KERNEL_NAMES.add(kernel.__name__)
    if not HAS_TRITON:
        return kernel
    return (triton.jit if INTERPRET else Kernel)(kernel, do_not_specialize=list(varying))


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
