"""Convolutions over two rows of a block, whose weights are changed for every row.

    y_t = (base_0 + d_t0) x_t + (base_1 + d_t1) x_{t-1}

where x_{t-1} is 0 in the first row of a block, and neighbouring channels, a group, share d_t. All
is float32, and rounded once. A row depends on itself and on the row before it alone, so the padding
after a block's rows may hold anything.
"""

import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import jit, launch_options, tl, use_triton
from specdec.kernels.kept import store_kept
from specdec.kernels.linear import Sums
from specdec.kernels.norms import finished
from specdec.kernels.overlap import begin
from specdec.kernels.tiles import empty_rows

BLOCK = 1024  # channels of a program


def convolve(x: Sums, base_2D: Tensor, changes_XG: Tensor, rows_per_block: int) -> Tensor:
    """Return [X, D] in the dtype of the weights.

    x:       rows [X, D], blocks of `rows_per_block` one after another; of a product, unfinished
    base:    the weights of a row itself, and of the one before it
    changes: d_t0 of all groups, then d_t1; [X, 2 x groups], may be columns of a wider tensor
    """
    assert x.weights_TS is None, "parts of experts are no rows of a draft"
    if not use_triton(base_2D):
        return convolve_ref(x, base_2D, changes_XG, rows_per_block)
    splits, X, D = x.parts_STN.shape
    assert x.parts_STN.is_contiguous(), x.parts_STN.stride()
    assert changes_XG.stride(1) == 1, changes_XG.stride()
    out_XD = empty_rows(base_2D, X, D)
    groups = changes_XG.shape[1] // 2
    bias = base_2D if x.bias_N is None else x.bias_N
    _convolve_kernel[(X, -(-D // BLOCK))](
        *(out_XD, x.parts_STN, bias, base_2D, changes_XG, changes_XG.stride(0), X, D),
        ROWS=rows_per_block,
        GROUPS=groups,
        SIZE=D // groups,
        SPLITS=splits,
        HAS_BIAS=x.bias_N is not None,
        BLOCK=BLOCK,
        num_warps=4,
        **launch_options(base_2D),
    )
    return out_XD


@jit(varying=("changes_ptr", "X"))
def _convolve_kernel(
    out_ptr,  # [X, D]
    parts_ptr,  # [SPLITS, X, D] float32, or rounded
    bias_ptr,  # [D]
    base_ptr,  # [2, D]
    changes_ptr,  # [X, 2 x GROUPS]
    stride_changes,
    X,
    D,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,  # channels of a group
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    dtype = out_ptr.dtype.element_ty
    x = finished(parts_ptr, bias_ptr, t, d, X, D, HAS_BIAS, SPLITS).to(dtype).to(tl.float32)
    earlier = tl.maximum(t - 1, 0)
    before = finished(parts_ptr, bias_ptr, earlier, d, X, D, HAS_BIAS, SPLITS)
    before = tl.where(t % ROWS > 0, before.to(dtype).to(tl.float32), 0.0)
    change_at = changes_ptr + t * stride_changes + d // SIZE
    weight = tl.load(base_ptr + d, mask=inside, other=0.0).to(tl.float32)
    weight += tl.load(change_at, mask=inside, other=0.0).to(tl.float32)
    weight_before = tl.load(base_ptr + D + d, mask=inside, other=0.0).to(tl.float32)
    weight_before += tl.load(change_at + GROUPS, mask=inside, other=0.0).to(tl.float32)
    y = weight * x + weight_before * before
    store_kept(out_ptr + t * D + d, y.to(dtype), inside)


def convolve_ref(x: Sums, base_2D: Tensor, changes_XG: Tensor, rows_per_block: int) -> Tensor:
    dtype = base_2D.dtype
    rows_XD = x.finish(dtype).float()
    blocks_BRD = rows_XD.unflatten(0, (-1, rows_per_block))
    before_XD = F.pad(blocks_BRD[:, :-1], (0, 0, 1, 0)).flatten(0, 1)
    changes_X2G = changes_XG.float().unflatten(1, (2, -1))
    size = rows_XD.shape[1] // changes_X2G.shape[2]
    weights_X2D = base_2D.float() + changes_X2G.repeat_interleave(size, dim=2)
    out_XD: Tensor = weights_X2D[:, 0] * rows_XD + weights_X2D[:, 1] * before_XD
    return out_XD.to(dtype)
