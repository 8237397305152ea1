"""Rows of a table whose rows are cut: what a rank finds of its own, and those of all ranks.

The row of an id lies on one rank, and others give zeros. Bits are merged, since -0 + 0 is another
zero. Two launches in place of one for each torch op: a draft looks up a few ids in every level.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import begin

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
BLOCK = 2048


def own_rows(ids_T: Tensor, table_RD: Tensor, first: int) -> Tensor:
    """Look up ids in rows first .. first + R - 1 of a table: [T, D], zeros for ids elsewhere."""
    if not use_triton(table_RD):
        return own_rows_ref(ids_T, table_RD, first)
    assert table_RD.is_contiguous(), table_RD.stride()
    (T,), (R, D) = ids_T.shape, table_RD.shape
    out_TD = table_RD.new_empty(T, D)
    options = {"BLOCK": next_power_of_2(D), "num_warps": 4} | launch_options(table_RD)
    _own_rows_kernel[(T,)](out_TD, ids_T, table_RD, first, R, D, **options)
    return out_TD


def rows_of_all(rows_NTD: Tensor) -> Tensor:
    """Merge rows [n, T, D] of which all ranks but one have zeros: [T, D]."""
    if not use_triton(rows_NTD):
        return rows_of_all_ref(rows_NTD)
    N, T, D = rows_NTD.shape
    out_TD = rows_NTD.new_empty(T, D)
    bits = BITS[rows_NTD.element_size()]
    options = {"N": N, "BLOCK": BLOCK, "num_warps": 4} | launch_options(rows_NTD)
    grid = (-(-T * D // BLOCK),)
    _merge_kernel[grid](out_TD.view(bits), rows_NTD.view(bits), T * D, **options)
    return out_TD


@jit(varying=("ids_ptr", "first", "R"))
def _own_rows_kernel(
    out_ptr,  # [T, D]
    ids_ptr,  # [T]
    table_ptr,  # [R, D]
    first,
    R,
    D,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + t) - first
    d = tl.arange(0, BLOCK)
    is_here = (row >= 0) & (row < R) & (d < D)
    x = tl.load(table_ptr + row * D + d, mask=is_here, other=0.0)
    tl.store(out_ptr + t * D + d, x, mask=d < D)


@jit(varying=("count",))
def _merge_kernel(
    out_ptr,  # [count] bits
    rows_ptr,  # [N, count]
    count,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    bits = tl.load(rows_ptr + i, mask=inside, other=0)
    for rank in tl.static_range(1, N):
        bits |= tl.load(rows_ptr + rank * count + i, mask=inside, other=0)
    tl.store(out_ptr + i, bits, mask=inside)


def own_rows_ref(ids_T: Tensor, table_RD: Tensor, first: int) -> Tensor:
    row_T = ids_T - first
    is_here_T1 = ((row_T >= 0) & (row_T < len(table_RD)))[:, None]
    return table_RD[row_T.clamp(0, len(table_RD) - 1)].where(is_here_T1, 0)


def rows_of_all_ref(rows_NTD: Tensor) -> Tensor:
    bits_NTD = rows_NTD.view(BITS[rows_NTD.element_size()])
    bits_TD = bits_NTD[0]
    for others_TD in bits_NTD[1:]:
        bits_TD = bits_TD | others_TD
    return bits_TD.view(rows_NTD.dtype)
