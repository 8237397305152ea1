"""Queries and residual stream of some rows: what a last layer goes on with where few are read."""

from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.opaque import opaque
from specdec.kernels.overlap import begin


@opaque(lambda q, stream, rows: (q.new_empty(len(rows), *q.shape[1:]), stream[rows]))
def take_rows(q_THC: Tensor, stream_TD: Tensor, rows_X: Tensor) -> tuple[Tensor, Tensor]:
    """Returns [X, H, C] and [X, D]; for a number that is no row, as padding has, some row."""
    if not use_triton(q_THC):
        return take_rows_ref(q_THC, stream_TD, rows_X)
    assert q_THC.is_contiguous(), q_THC.stride()
    assert stream_TD.stride(1) == 1, stream_TD.stride()
    T, H, C = q_THC.shape
    X, D = len(rows_X), stream_TD.shape[1]
    q_XHC, stream_XD = q_THC.new_empty(X, H, C), stream_TD.new_empty(X, D)
    sizes = {"QUERY": H * C, "D": D, "BLOCK": next_power_of_2(max(H * C, D))}
    options = {"num_warps": 8} | launch_options(q_THC)
    tensors = (q_XHC, stream_XD, q_THC, stream_TD, rows_X)
    _take_rows_kernel[(X, 2)](*tensors, T, stream_TD.stride(0), **sizes, **options)
    return q_XHC, stream_XD


@jit(varying=("rows_ptr", "T"))
def _take_rows_kernel(
    q_out_ptr,  # [X, QUERY]
    stream_out_ptr,  # [X, D]
    q_ptr,  # [T, QUERY]
    stream_ptr,  # [T, D]
    rows_ptr,  # [X]
    T,
    stride_stream,
    QUERY: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    x = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + x)
    row = tl.minimum(tl.maximum(row, 0), T - 1)
    i = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        q = tl.load(q_ptr + row * QUERY + i, mask=i < QUERY, other=0.0)
        tl.store(q_out_ptr + x * QUERY + i, q, mask=i < QUERY)
    else:
        stream = tl.load(stream_ptr + row * stride_stream + i, mask=i < D, other=0.0)
        tl.store(stream_out_ptr + x * D + i, stream, mask=i < D)


def take_rows_ref(q_THC: Tensor, stream_TD: Tensor, rows_X: Tensor) -> tuple[Tensor, Tensor]:
    rows_X = rows_X.clamp(0, len(q_THC) - 1)
    return q_THC[rows_X], stream_TD[rows_X]
