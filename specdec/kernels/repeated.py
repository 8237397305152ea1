"""A kernel that is launched for one layer after another, with other tensors and all else equal.

At each launch Triton finds out which of its compiled kernels the arguments need, for longer than
many of them run. Here it does so once, and the kernel found is launched again, on the stream that
is current then. Triton's launch hooks, which its profiler sets, do not see that.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.kernels import INTERPRET, GluonDescriptor, active_mode


class Repeated:
    """kernel[grid] over the tensors of a call, then `then`, then `constants`, as its parameters.

    The tensors of every call have the dtypes and the alignment of the first call's; those that the
    kernel lets vary may be aligned in any way. Descriptors may stand for tensors, of blocks of the
    same shapes in every call, numbers that the kernel lets vary, and None in all calls or in none.
    shared_bytes: of shared memory that a program takes, at least, so that fewer fit a
    multiprocessor; up to 48 KB
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        *,
        then: Sequence[object],
        constants: Mapping[str, object],
        options: Mapping[str, object],
        shared_bytes: int = 0,
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._then = then
        self._constants = constants
        self._options = options
        self._shared_bytes = shared_bytes
        self._found: Callable[..., object] | None = None

    def __call__(self, *tensors: Tensor | GluonDescriptor | int | None) -> None:
        if INTERPRET or active_mode.get() is not None:  # where launches are something else
            options = {**self._constants, **self._options}
            self._kernel[self._grid](*tensors, *self._then, **options)
            return
        if self._found is None:
            self._found = self._find(tensors)
        self._found(*map(_argument, tensors))

    def _find(
        self, tensors: Sequence[Tensor | GluonDescriptor | int | None]
    ) -> Callable[..., object]:
        options = {**self._constants, **self._options}
        kernel = self._kernel.run(*tensors, *self._then, **options, grid=self._grid, warmup=True)
        if hasattr(kernel, "result"):  # being compiled
            kernel = kernel.result()
        run = kernel.run
        num_warps, num_ctas, shared = kernel.packed_metadata
        packed = num_warps, num_ctas, max(shared, self._shared_bytes)
        of_kernel = kernel.function, packed, None, None, None  # metadata and hooks
        # addresses: Triton would ask each tensor for its own, and the driver whether it is one
        rest = *map(_argument, self._then), *self._constants.values()
        stream_of, device = torch._C._cuda_getCurrentRawStream, torch.cuda.current_device()
        grid = self._grid
        return lambda *tensors: run(*grid, stream_of(device), *of_kernel, *tensors, *rest)


def _argument(value: object) -> object:
    return value.data_ptr() if isinstance(value, Tensor) else value
