"""Who computes products and attention: this project's kernels, or what a measurement gives instead.

    with using(Backend(linear=cublas_linear)):
        ...                                     # on a GPU every `linear` is cuBLAS's here

Only specdec/bench sets one, in the thread that launches. A graph keeps what it has captured.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from specdec.kernels import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What to call with the parameters of the launchers of these names; None: our own.

    attend, experts: on any device, the others on a GPU. experts: of ids and weights of rows to
        their sum [T, D], not where torch.compile traces
    """

    linear: Callable[..., Tensor] | None = None
    split_linear: Callable[..., Tensor] | None = None
    gate_up: Callable[..., Tensor] | None = None
    fp8_linear: Callable[..., Tensor] | None = None
    fp8_split_linear: Callable[..., Tensor] | None = None
    fp8_gate_up: Callable[..., Tensor] | None = None
    tile_maxima: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    attend: Callable[[Tensor, Tensor, int, bool], None] | None = None
    experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None


backend: ContextVar[Backend] = ContextVar("backend", default=Backend())  # noqa: B039  # it is frozen


def using(other: Backend) -> AbstractContextManager[None]:
    return setting(backend, other)
