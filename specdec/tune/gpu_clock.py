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
from specdec.kernels.fp8.products import (
    launch_fp8_gate_up,
    launch_fp8_linear,
    launch_fp8_split_linear,
)
from specdec.kernels.fp8.weight import Fp8, Fp8Rows, scales_shape
from specdec.kernels.gate_up import launch_gate_up
from specdec.kernels.linear import launch_linear, launch_split_linear
from specdec.kernels.tile_rule import measured_rows
from specdec.kernels.tile_shapes import FP8, Product, rows_of_tiles, size_of
from specdec.kernels.tiles import Tiles
from weights.bars import bar

Matrix = Tensor | Fp8 | Fp8Rows
OUT = torch.bfloat16  # of 8-bit products
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
    """Times products. It keeps the weights of the last one.

    is_block: the form of 8-bit products, which share tiles
    """

    def __init__(self, device: torch.device, is_block: bool = False) -> None:
        self.device = device
        self.has_wgmma = is_hopper(device)
        self._is_block = is_block
        self._pool = CudaBackend(device).new_pool()
        self._product: Product | None = None
        self._weights: list[Matrix] = []

    def prepare(self, jobs: Iterable[Job]) -> None:
        """Compile all that `time` may be asked for; it leaves out what does not compile."""
        unique = list({_binary(job): job for job in jobs}.values())
        with bar(total=len(unique), desc="compiling", unit="kernel") as progress:
            for first in range(0, len(unique), COMPILED_AT_ONCE):
                part = unique[first : first + COMPILED_AT_ONCE]
                with compiling_ahead(self.device, progress=False, may_fail=True):
                    for job in part:
                        weight = self._weight_of(job.product)
                        _launch(job.product, self._rows_of(job), weight, job.tiles)
                progress.update(len(part))

    def time(self, job: Job) -> float:
        """Median microseconds; infinite if these tiles do not run here."""
        x = self._rows_of(job, is_random=True)
        weights = self._weights_of(job.product)

        def call(weight: Matrix) -> object:
            if job.tiles is None:
                return _by_cublas(x, weight)
            return _launch(job.product, x, weight, job.tiles)

        try:
            call(weights[0])
        except torch.AcceleratorError:  # a RuntimeError too; after it no call on this GPU succeeds
            raise
        except (RuntimeError, triton.errors.TritonError):
            return float("inf")
        least = _least_microseconds(job)
        wanted = min(MOST_CALLS, max(1, round(GRAPH_US / least)))
        return self._time_graph(call, weights * max(1, wanted // len(weights)))

    def _time_graph(self, call: Callable[[Matrix], object], weights: list[Matrix]) -> float:
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

    def _weights_of(self, product: Product) -> list[Matrix]:
        if product != self._product:
            self._weights.clear()
            size = product.N * product.K * size_of(product.dtype)
            for _ in range(min(MOST_COPIES, -(-3 * L2 // size))):
                self._weights.append(self._weight_of(product, is_random=True))
            self._product = product
        return self._weights

    def _rows_of(self, job: Job, is_random: bool = False) -> Matrix:
        """Make rows, with further rows after them as in a model."""
        rows, K = measured_rows(job.rows), job.product.K
        x_TK = self._matrix(rows_of_tiles(rows), K, job.product, is_random)[:rows]
        if job.product.dtype != FP8:
            return x_TK
        shape = scales_shape(rows, K, self._is_block)
        return Fp8Rows(x_TK, torch.ones(shape, device=self.device))

    def _weight_of(self, product: Product, is_random: bool = False) -> Matrix:
        N, K = product.N, product.K
        weight_NK = self._matrix(N, K, product, is_random)
        if product.dtype != FP8:
            return weight_NK
        shape = (scales_shape(N, K, True)[0], N) if self._is_block else (N,)
        return Fp8(weight_NK, torch.ones(shape, device=self.device), is_shared=self._is_block)

    def _matrix(self, rows: int, columns: int, product: Product, is_random: bool) -> Tensor:
        dtype = getattr(torch, product.dtype)
        if not is_random:
            return torch.empty(rows, columns, dtype=dtype, device=self.device)
        wide = torch.bfloat16 if product.dtype == FP8 else dtype
        return torch.randn(rows, columns, dtype=wide, device=self.device).to(dtype)


def _launch(product: Product, x: Matrix, weight: Matrix, tiles: Tiles | None) -> object:
    """Launch the kernel that a model runs for this product, with tiles of our choice."""
    if isinstance(x, Fp8Rows) and isinstance(weight, Fp8):
        if product.kind == "gate":
            return launch_fp8_gate_up(x, weight, None, OUT, tiles)
        if product.kind == "split":
            return launch_fp8_split_linear(x, weight, OUT, tiles=tiles)
        return launch_fp8_linear(x, weight, None, OUT, tiles)
    assert isinstance(x, Tensor)
    assert isinstance(weight, Tensor)
    if product.kind == "gate":
        return launch_gate_up(x, weight, None, tiles)
    if _is_head(product):
        return launch_tile_maxima(x, weight, tiles=tiles)
    if product.kind == "split":
        return launch_split_linear(x, weight, x.dtype, tiles=tiles)
    return launch_linear(x, weight, None, x.dtype, tiles)


def _by_cublas(x: Matrix, weight: Matrix) -> Tensor:
    """Multiply as torch does: 8-bit numbers with a scale a row, and its fast accumulation."""
    if isinstance(x, Fp8Rows) and isinstance(weight, Fp8):
        codes = x.codes_TK, weight.codes_NK.t()
        of_x, of_w = (each.scales[0] if each.is_block else each.scales for each in (x, weight))
        scales = of_x[: len(x.codes_TK), None], of_w[None]
        return torch._scaled_mm(*codes, *scales, out_dtype=OUT, use_fast_accum=True)
    assert isinstance(x, Tensor)
    assert isinstance(weight, Tensor)
    return torch.mm(x, weight.t())


def _is_head(product: Product) -> bool:
    """Whether the weight is a vocabulary's, which best_token reads with a whole product's tiles."""
    is_wide = product.dtype != FP8
    return is_wide and product.kind == "whole" and product.N > 4 * product.K


def _binary(job: Job) -> tuple[object, ...]:
    """Return what a kernel is compiled for: Triton tells multiples of 16 from other sizes."""
    product = job.product
    sizes = (product.N % 16, product.K % 16, measured_rows(job.rows) % 16)
    return product.kind, _is_head(product), product.dtype, sizes, job.tiles


def _least_microseconds(job: Job) -> float:
    """Bound the time by what the memory or the tensor cores of an H200 need at least."""
    weight = job.product.N * job.product.K
    size = size_of(job.product.dtype)
    return max(weight * size / 4.5e6, weight * size * measured_rows(job.rows) / 7e8)
