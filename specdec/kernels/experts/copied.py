"""Rows of x at the places of their pairs: those of an expert lie one after another.

The copy engine then brings tiles of them, which costs a product's warps nothing, where gathers cost
them addresses. A row is read once and written k times.
"""

from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs


def copy_rows(x_TD: Tensor, place_P: Tensor) -> Tensor:
    """Copy to [P, D]: row t to the places of its pairs t * k + s, but -1. Other rows: anything."""
    T, D = x_TD.shape
    assert x_TD.stride(1) == 1, x_TD.stride()
    if not use_triton(x_TD):
        return copy_rows_ref(x_TD, place_P)
    out_PD = x_TD.new_empty(len(place_P), D)
    sizes = {"SLOTS": len(place_P) // T, "BLOCK_D": next_power_of_2(D)}
    options = {"num_warps": 4} | launch_options(x_TD)
    _copy_kernel[(T,)](out_PD, x_TD, place_P, x_TD.stride(0), D, **sizes, **options)
    return out_PD


@jit
def _copy_kernel(
    out_ptr,  # [T SLOTS, D]
    x_ptr,  # [T, D]
    place_ptr,  # [T, SLOTS]
    stride_x,
    D,
    SLOTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    let_the_next_start(PDL)  # it may look tiles up: what made them has ended
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + t * stride_x + d, mask=d < D, other=0.0)
    for s in tl.static_range(SLOTS):
        place = tl.load(place_ptr + t * SLOTS + s).to(tl.int64)
        tl.store(out_ptr + place * D + d, x, mask=(d < D) & (place >= 0))


def copy_rows_ref(x_TD: Tensor, place_P: Tensor) -> Tensor:
    (T, D), P = x_TD.shape, len(place_P)
    x_PD = x_TD.repeat_interleave(P // T, dim=0)
    out_PD = x_TD.new_zeros(P + 1, D)  # the last is no place
    return out_PD.index_copy(0, place_P.long().where(place_P >= 0, P), x_PD)[:P]
