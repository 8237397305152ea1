"""Kernels: one file each, with its public function, its Triton kernel and its torch twin.

Here is the project's one device check. Triton is imported where it can run: with a CUDA device, or
in its interpreter (TRITON_INTERPRET=1, for tests). Elsewhere `jit` leaves the kernels as they are
and `use_triton` is never true.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from threading import get_ident
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["AsyncCompileMode", "GluonDescriptor", "TensorDescriptor", "active_mode", "gl", "hopper"]
__all__ += ["constexpr_function", "kernel_cache", "make_backend", "tl", "triton"]  # Triton's

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
NO_GPU = "SPECDEC_COMPILER"  # in the environment of processes that compile without a GPU
HAS_TRITON = INTERPRET or NO_GPU in os.environ or torch.cuda.is_available()

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.compiler.compiler import make_backend
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    from triton.runtime import cache as kernel_cache
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
    from triton.runtime.jit import constexpr_function
    from triton.tools.tensor_descriptor import TensorDescriptor

    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name in Triton 3.6

    class Launches:
        """Launches are requests to compile where the calling thread only compiles."""

        run: Callable[..., object]
        compile: Callable[..., object]

        def __getitem__(self, grid):
            is_compiling = active_mode.get() is not None
            return partial(self.run, grid=grid, warmup=is_compiling)

        def create_binder(self):
            made = super().create_binder()  # type: ignore[misc]  # of Triton's, which ships no types
            self.compile = partial(_compile, self.compile)
            return made

    def _compile(compiler, source, **options):
        prepare = before_compiling.get()
        if prepare is not None:
            prepare(source, **options)
        COMPILING.add(get_ident())
        try:
            return compiler(source, **options)
        finally:
            COMPILING.discard(get_ident())

    class Kernel(Launches, triton.JITFunction): ...  # type: ignore[misc]

    class GluonKernel(Launches, GluonJITFunction):  # type: ignore[misc]
        """A kernel in Gluon, Triton's lower layer, with its own layouts, barriers and warps."""

else:
    triton = TensorDescriptor = GluonDescriptor = AsyncCompileMode = active_mode = None
    make_backend = kernel_cache = hopper = barrier = None
    tl = gl = SimpleNamespace(constexpr=None)  # signatures of kernels name tl.constexpr

    def constexpr_function(function):
        """Leave the function for kernels to call as they are compiled."""
        return function


before_compiling: ContextVar[Callable[..., None] | None] = ContextVar(
    "before_compiling", default=None
)  # what a thread that compiles calls first, with the arguments of triton.compile
COMPILING: set[int] = set()  # threads that compile at the moment
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def jit(kernel=None, *, varying=()):
    """Make a Triton kernel; without Triton leave the function, which is never launched.

    varying: arguments that differ from call to call, so that one compiled kernel serves every value
    and every alignment of them.
    """
    if kernel is None:
        return partial(jit, varying=varying)
    if not HAS_TRITON:
        return kernel
    return (triton.jit if INTERPRET else Kernel)(kernel, do_not_specialize=list(varying))


def gluon_jit(kernel=None, *, varying=()):
    """Make a kernel in Gluon, which no interpreter runs; without Triton leave the function."""
    if kernel is None:
        return partial(gluon_jit, varying=varying)
    return GluonKernel(kernel, do_not_specialize=list(varying)) if HAS_TRITON else kernel


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a variable of this thread for the body."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def only_compiles() -> bool:
    """Whether launches of the calling thread compile and run nothing: see compilations.py."""
    return active_mode is not None and active_mode.get() is not None


def use_triton(tensor: Tensor) -> bool:
    """Whether a call on this tensor goes to the Triton kernel; else to the torch twin."""
    return tensor.is_cuda


def pick(tensor: Tensor, launch: Callable[P, R], twin: Callable[P, R]) -> Callable[P, R]:
    """Pick the launcher of a Triton kernel or its torch twin, by the tensor."""
    return launch if use_triton(tensor) else twin


def launch_options(tensor: Tensor) -> dict[str, bool]:
    """Return whether kernels on this device overlap (overlap.py): Hopper GPUs and later do."""
    if not tensor.is_cuda:
        return {"PDL": False}
    has_pdl = _capability(tensor.device.index or 0)[0] >= 9
    return {"PDL": has_pdl, "launch_pdl": has_pdl}


def is_hopper(device: torch.device) -> bool:
    """Whether wgmma is there: compute capability 9.0, and no other."""
    return device.type == "cuda" and _capability(device.index or 0)[0] == 9


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Count a GPU's multiprocessors: that many large programs run at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
