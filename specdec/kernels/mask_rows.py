"""logits[row_X[x], v] += -inf where bit v of bits_XW[x] is 0, for rows that a grammar guides.

Entries with row -1 are left out.

The lowest bit of a word is its first id; v is an id, also where columns begin at another. Added, so
that NaN stays NaN. Ids beyond the words are not masked, and there are none: W = ceil(V / 32).
"""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, tl, use_triton
from specdec.kernels.overlap import begin

BLOCK = 2048


def mask_rows(logits_TV: Tensor, row_X: Tensor, bits_XW: Tensor, first: int = 0) -> None:
    """Mask some rows in place, each at most once.

    logits_TV: float32. row_X: int64. bits_XW: int32, of all ids. first: id of the first column
    """
    if not use_triton(logits_TV):
        return mask_rows_ref(logits_TV, row_X, bits_XW, first)
    X, W = bits_XW.shape
    V = logits_TV.shape[1]
    options = {"BLOCK": BLOCK, "num_warps": 4} | launch_options(logits_TV)
    grid = (-(-V // BLOCK), X)
    _mask_rows_kernel[grid](logits_TV, row_X, bits_XW, logits_TV.stride(0), V, W, first, **options)


@jit(varying=("rows_ptr", "bits_ptr"))
def _mask_rows_kernel(
    logits_ptr,  # [T, V] float32
    rows_ptr,  # [X]
    bits_ptr,  # [X, W] int32
    stride_logits,
    V,
    W,
    first,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    x = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + x)
    inside = (column < V) & (row >= 0)
    id = first + column
    word = tl.load(bits_ptr + x * W + id // 32, mask=inside, other=-1)
    is_out = ((word >> (id % 32)) & 1) == 0
    at = logits_ptr + row * stride_logits + column
    logits = tl.load(at, mask=inside & is_out, other=0.0)
    tl.store(at, logits + float("-inf"), mask=inside & is_out)


def mask_rows_ref(logits_TV: Tensor, row_X: Tensor, bits_XW: Tensor, first: int = 0) -> None:
    v_V = torch.arange(first, first + logits_TV.shape[1], device=logits_TV.device)
    is_allowed_XV = (bits_XW[:, v_V // 32] >> (v_V % 32)) & 1 == 1
    added_XV = torch.where(is_allowed_XV | (row_X < 0)[:, None], 0.0, -torch.inf)
    logits_TV.index_add_(0, row_X.clamp(min=0), added_XV)
