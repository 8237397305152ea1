"""Microseconds of one product with given tiles on this GPU, beside cuBLAS.

A product is timed as a graph of calls over copies of its weight, enough that no copy is still in
the cache when its turn comes. Kernels are the same for every N and K, so they are compiled first,
all at once: 340 for all known models, about a minute on 16 cores. Those have 59 products and 9,200
candidates of 20 to 30 milliseconds each, parts included: three to five minutes.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from graphs.cuda import CudaBackend
from specdec.kernels import is_hopper, triton
from specdec.kernels.best_token import launch_tile_maxima
from specdec.kernels.compilations import compiling_ahead
from specdec.kernels.gate_up import launch_gate_up
from specdec.kernels.linear import launch_linear, launch_split_linear
from specdec.kernels.tile_rule import measured_rows
from specdec.kernels.tile_shapes import Product, rows_of_tiles
from specdec.kernels.tiles import Tiles
from weights.bars import bar

L2 = 64 << 20  # bytes of an H200's, rounded up
MOST_COPIES = 32
GRAPH_US = 200.0  # a graph this long hides its own launch
MOST_CALLS = 48
COMPILED_AT_ONCE = 128


class Job(NamedTuple):
    product: Product
    rows: int  # a row class
    tiles: Tiles | None  # None: cuBLAS's


class GpuClock:
    """Times products. It keeps the weights of the last one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_wgmma = is_hopper(device)
        self._pool = CudaBackend(device).new_pool()
        self._product: Product | None = None
        self._weights: list[Tensor] = []

    def prepare(self, jobs: Iterable[Job]) -> None:
        """Compile all that `time` may be asked for; it leaves out what does not compile."""
        unique = list({_binary(job): job for job in jobs}.values())
        with bar(total=len(unique), desc="compiling", unit="kernel") as progress:
            for first in range(0, len(unique), COMPILED_AT_ONCE):
                part = unique[first : first + COMPILED_AT_ONCE]
                with compiling_ahead(self.device, progress=False, may_fail=True):
                    for job in part:
                        weight = self._empty(job.product.N, job.product.K, job.product)
                        _launch(job.product, self._rows_of(job), weight, job.tiles)
                progress.update(len(part))

    def time(self, job: Job) -> float:
        """Median microseconds; infinite if these tiles do not run here."""
        x_TK = self._rows_of(job).normal_()
        weights = self._weights_of(job.product)

        def call(weight_NK: Tensor) -> object:
            if job.tiles is None:
                return torch.mm(x_TK, weight_NK.t())
            return _launch(job.product, x_TK, weight_NK, job.tiles)

        try:
            call(weights[0])
        except torch.AcceleratorError:  # a RuntimeError too; after it no call on this GPU succeeds
            raise
        except (RuntimeError, triton.errors.TritonError):
            return float("inf")
        least = _least_microseconds(job)
        wanted = min(MOST_CALLS, max(1, round(GRAPH_US / least)))
        return self._time_graph(call, weights * max(1, wanted // len(weights)))

    def _time_graph(self, call: Callable[[Tensor], object], weights: list[Tensor]) -> float:
        with self._pool.session(self, collect=False) as session:
            session.begin()
            for weight in weights:
                call(weight)
            graph = session.end()
        assert graph is not None, "nothing was captured"
        bench = triton.testing.do_bench
        total = bench(graph.replay, warmup=2, rep=8, return_mode="median")
        graph.reset()
        return float(total) * 1e3 / len(weights)

    def _weights_of(self, product: Product) -> list[Tensor]:
        if product != self._product:
            self._weights.clear()
            copies = min(MOST_COPIES, -(-3 * L2 // (product.N * product.K * 2)))
            for _ in range(copies):
                self._weights.append(self._empty(product.N, product.K, product).normal_())
            self._product = product
        return self._weights

    def _rows_of(self, job: Job) -> Tensor:
        """Make rows, with further rows after them as in a model."""
        rows = measured_rows(job.rows)
        return self._empty(rows_of_tiles(rows), job.product.K, job.product)[:rows]

    def _empty(self, rows: int, columns: int, product: Product) -> Tensor:
        dtype = getattr(torch, product.dtype)
        return torch.empty(rows, columns, dtype=dtype, device=self.device)


def _launch(product: Product, x_TK: Tensor, weight_NK: Tensor, tiles: Tiles | None) -> object:
    """Launch the kernel that a model runs for this product, with tiles of our choice."""
    if product.kind == "gate":
        return launch_gate_up(x_TK, weight_NK, None, tiles)
    if _is_head(product):
        return launch_tile_maxima(x_TK, weight_NK, tiles=tiles)
    if product.kind == "split":
        return launch_split_linear(x_TK, weight_NK, x_TK.dtype, tiles=tiles)
    return launch_linear(x_TK, weight_NK, None, x_TK.dtype, tiles)


def _is_head(product: Product) -> bool:
    """Whether the weight is a vocabulary's, which best_token reads with a whole product's tiles."""
    return product.kind == "whole" and product.N > 4 * product.K


def _binary(job: Job) -> tuple[object, ...]:
    """Return what a kernel is compiled for: Triton tells multiples of 16 from other sizes."""
    product = job.product
    sizes = (product.N % 16, product.K % 16, measured_rows(job.rows) % 16)
    return product.kind, _is_head(product), product.dtype, sizes, job.tiles


def _least_microseconds(job: Job) -> float:
    """Bound the time by what the memory or the tensor cores of an H200 need at least."""
    weight = job.product.N * job.product.K
    return max(weight * 2 / 4.5e6, weight * 2 * measured_rows(job.rows) / 7e8)
