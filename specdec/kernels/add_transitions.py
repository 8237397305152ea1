"""What the token before a draft adds to the scores of candidates, by a DFlash2 draft's selector.

    score += <predecessor[token before] * projected, successor[candidate]>

in float32. A score that is no number becomes -inf: padding's rows may hold anything.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.invariant import tree_sum
from specdec.kernels.overlap import begin


def add_transitions(
    scores_kB: Tensor,
    ids_kB: Tensor,
    token_B: Tensor,
    projected_Bs: Tensor,
    predecessor_Vs: Tensor,
    successor_Ws: Tensor,
) -> None:
    """Add to scores, float32; columns of wider tensors will do. Ids beyond the table add 0.

    ids:       of the candidates, with the strides of scores
    token:     the target's ids of the tokens before
    projected: of the rows that propose
    """
    operands = scores_kB, ids_kB, token_B, projected_Bs, predecessor_Vs, successor_Ws
    if not use_triton(scores_kB):
        add_transitions_ref(*operands)
        return
    assert scores_kB.stride() == ids_kB.stride(), (scores_kB.stride(), ids_kB.stride())
    assert projected_Bs.stride(1) == 1, projected_Bs.stride()
    k, B = scores_kB.shape
    assert scores_kB.stride(1) == 1 or B == 1, scores_kB.stride()
    W, s = successor_Ws.shape
    _add_transitions_kernel[(B,)](
        *(*operands, scores_kB.stride(0), token_B.stride(0), projected_Bs.stride(0), W, s),
        K=k,
        K_PADDED=next_power_of_2(k),
        BLOCK=next_power_of_2(s),
        num_warps=4,
        **launch_options(scores_kB),
    )


@jit(varying=("scores_ptr", "ids_ptr", "token_ptr", "projected_ptr", "stride", "stride_token"))
def _add_transitions_kernel(
    scores_ptr,  # [K, B] float32
    ids_ptr,  # [K, B] int32
    token_ptr,  # [B]
    projected_ptr,  # [B, s]
    predecessor_ptr,  # [V, s]
    successor_ptr,  # [W, s]
    stride,  # of scores and ids
    stride_token,
    stride_projected,
    W,
    s,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < s
    token = tl.load(token_ptr + b * stride_token)
    before = tl.load(predecessor_ptr + token * s + i, mask=inside, other=0.0).to(tl.float32)
    projected = tl.load(projected_ptr + b * stride_projected + i, mask=inside, other=0.0).to(
        tl.float32
    )
    k = tl.arange(0, K_PADDED)
    at = k * stride + b
    id = tl.load(ids_ptr + at, mask=k < K, other=0).to(tl.int64)
    is_read = ((k < K) & (id < W))[:, None] & inside[None, :]
    after_at = successor_ptr + id[:, None] * s + i[None, :]
    after = tl.load(after_at, mask=is_read, other=0.0).to(tl.float32)
    score = tl.load(scores_ptr + at, mask=k < K, other=0.0)
    score += tl.sum((before * projected)[None, :] * after, axis=1)
    tl.store(scores_ptr + at, tl.where(score == score, score, float("-inf")), mask=k < K)


def add_transitions_ref(
    scores_kB: Tensor,
    ids_kB: Tensor,
    token_B: Tensor,
    projected_Bs: Tensor,
    predecessor_Vs: Tensor,
    successor_Ws: Tensor,
) -> None:
    context_Bs = predecessor_Vs[token_B].float() * projected_Bs.float()
    after_kBs = successor_Ws[ids_kB].float()
    added_kB = scores_kB + tree_sum(context_Bs * after_kBs)[..., 0]
    scores_kB.copy_(torch.where(added_kB.isnan(), -torch.inf, added_kB))
