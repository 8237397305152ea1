"""What an EAGLE-3 draft's first layer reads: concat(norm(embedding), norm(feature)), [T, 2D].

One launch in place of a gather for the embeddings, another where features are picked by row, two
norms and a concatenation: the draft has no other work for so few rows meanwhile. A norm has the
bits of `rms_norm`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.norms import NORM_WARPS, normed, rms_norm_ref
from specdec.kernels.opaque import opaque
from specdec.kernels.overlap import begin
from specdec.kernels.tiles import empty_rows


class JointNorms(NamedTuple):
    """Weights of the norms of embeddings and of features."""

    embed_D: Tensor
    feature_D: Tensor
    eps: float


@opaque(lambda ids, table, features, norms: features.repeat(1, 2))
def joint_input(ids_T: Tensor, table_VD: Tensor, features_TD: Tensor, norms: JointNorms) -> Tensor:
    """Returns [T, 2D] in the features' dtype. ids: rows of the table of embeddings."""
    return joint_input_of_rows(ids_T, table_VD, features_TD, norms, None)[0]


def joint_input_of_rows(
    ids_T: Tensor, table_VD: Tensor, features_XD: Tensor, norms: JointNorms, rows_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Join some features, by row, or all; return the result and these features, [T, D]."""
    if not use_triton(features_XD):
        return joint_input_ref(ids_T, table_VD, features_XD, norms, rows_T)
    assert table_VD.is_contiguous(), table_VD.stride()
    assert features_XD.stride(1) == 1, features_XD.stride()
    T, D = len(ids_T), table_VD.shape[1]
    joined_T2D = empty_rows(features_XD, T, 2 * D)
    picked_TD = features_XD if rows_T is None else features_XD.new_empty(T, D)
    embed_D, feature_D, eps = norms
    tensors = (joined_T2D, picked_TD, ids_T, table_VD, embed_D, features_XD, feature_D)
    rows = ids_T if rows_T is None else rows_T
    flags = {"HAS_ROWS": rows_T is not None, "BLOCK_D": next_power_of_2(D)}
    options = {"num_warps": NORM_WARPS} | launch_options(features_XD)
    _joint_input_kernel[(T, 2)](*tensors, rows, features_XD.stride(0), D, eps, **flags, **options)
    return joined_T2D, picked_TD


@jit
def _joint_input_kernel(
    joined_ptr,  # [T, 2D]
    picked_ptr,  # [T, D], with HAS_ROWS
    ids_ptr,  # [T]
    table_ptr,  # [V, D]
    embed_weight_ptr,  # [D]
    features_ptr,  # [X, D]
    weight_ptr,  # [D]
    rows_ptr,  # [T], with HAS_ROWS
    stride_features,
    D,
    eps,
    HAS_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    is_feature = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    if is_feature:
        row = t
        if HAS_ROWS:
            row = tl.load(rows_ptr + t)
        x = tl.load(features_ptr + row * stride_features + d, mask=inside, other=0.0)
        w = tl.load(weight_ptr + d, mask=inside, other=0.0)
        if HAS_ROWS:
            tl.store(picked_ptr + t * D + d, x, mask=inside)
    else:
        x = tl.load(table_ptr + tl.load(ids_ptr + t) * D + d, mask=inside, other=0.0)
        w = tl.load(embed_weight_ptr + d, mask=inside, other=0.0)
    y = normed(x.to(tl.float32), w.to(tl.float32), D, eps)
    at = (2 * t + is_feature) * D + d
    tl.store(joined_ptr + at, y.to(joined_ptr.dtype.element_ty), mask=inside)


def joint_input_ref(
    ids_T: Tensor, table_VD: Tensor, features_XD: Tensor, norms: JointNorms, rows_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    picked_TD = features_XD if rows_T is None else features_XD[rows_T]
    sides = zip((table_VD[ids_T], picked_TD), norms[:2], strict=True)
    return torch.cat([rms_norm_ref(x, w, norms.eps) for x, w in sides], dim=-1), picked_TD
