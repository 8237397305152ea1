"""Count the tokens that a step committed: whole numbers, so the order of sums does not matter."""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, tl, use_triton
from specdec.kernels.overlap import begin
from specdec.rounds.state import RequestState


def count_sampled(
    state: RequestState, row_B: Tensor, token_BQ: Tensor, num_accepted_B: Tensor
) -> None:
    """Count the first num_accepted + 1 tokens of each batch slot, except for markers below 0.

    row_B: state row per batch slot, -1 = padding
    """
    if not use_triton(row_B):
        count_sampled_ref(state, row_B, token_BQ, num_accepted_B)
        return
    B, Q = token_BQ.shape
    tensors = state.sampling.output_counts, row_B, token_BQ, num_accepted_B
    strides = token_BQ.stride(0), num_accepted_B.stride(0)
    options = {"num_warps": 1} | launch_options(row_B)
    _count_sampled_kernel[(B,)](*tensors, *strides, state.sampling.vocab_size, Q=Q, **options)


@jit(varying=("idx_ptr", "tokens_ptr", "num_accepted_ptr", "stride_tokens", "stride_accepted"))
def _count_sampled_kernel(
    counts_ptr,  # [R + 1, V] int32
    idx_ptr,  # [B]
    tokens_ptr,  # [B, Q]
    num_accepted_ptr,  # [B]
    stride_tokens,
    stride_accepted,
    V,
    Q: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0)
    row = tl.load(idx_ptr + b)
    num_accepted = tl.load(num_accepted_ptr + b * stride_accepted)
    for i in tl.static_range(Q):
        token = tl.load(tokens_ptr + b * stride_tokens + i)
        if (row >= 0) & (i <= num_accepted) & (token >= 0):
            tl.atomic_add(counts_ptr + row.to(tl.int64) * V + token, 1, sem="relaxed")


def count_sampled_ref(
    state: RequestState, row_B: Tensor, token_BQ: Tensor, num_accepted_B: Tensor
) -> None:
    counts = state.sampling.output_counts
    V = state.sampling.vocab_size
    is_new_BQ = torch.arange(token_BQ.shape[1], device=row_B.device) <= num_accepted_B[:, None]
    is_new_BQ &= (row_B >= 0)[:, None] & (token_BQ >= 0)
    where_BQ = torch.where(is_new_BQ, row_B[:, None] * V + token_BQ, len(counts) * V - 1)
    counts.view(-1).scatter_add_(0, where_BQ.flatten(), is_new_BQ.flatten().to(counts.dtype))
