"""Who computes products and attention: this project's kernels, or what a measurement gives instead.

    with using(Backend(linear=cublas_linear)):
        ...                                     # on a GPU every `linear` is cuBLAS's here

Only specdec/bench sets one, in the thread that launches. A graph keeps what it has captured.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

# the parameters of the launchers of these names
Linear = Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
SplitLinear = Callable[[Tensor, Tensor, torch.dtype, int], Tensor]
GateUp = Callable[[Tensor, Tensor, Tensor | None], Tensor]
TileMaxima = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Attend = Callable[[Tensor, Tensor, int, bool], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What to call; None: our own. attend: on any device, the others on a GPU."""

    linear: Linear | None = None
    split_linear: SplitLinear | None = None
    gate_up: GateUp | None = None
    tile_maxima: TileMaxima | None = None
    attend: Attend | None = None


backend: ContextVar[Backend] = ContextVar("backend", default=Backend())  # noqa: B039  # it is frozen


@contextmanager
def using(other: Backend) -> Iterator[None]:
    """Call these in the body."""
    before = backend.set(other)
    try:
        yield
    finally:
        backend.reset(before)
