"""Count the tokens that a step committed. Whole numbers are added, so no order decides; the twin is processors.py's."""

from torch import Tensor

from specdec.kernels import jit, launch_options, tl, use_triton
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs
from specdec.sampler.processors import count_sampled as count_sampled_ref
from specdec.stepping.state import RequestState


def count_sampled(
    state: RequestState, row_B: Tensor, token_BQ: Tensor, num_accepted_B: Tensor
) -> None:
    """The first num_accepted + 1 tokens of each batch slot; row -1 is padding, markers below 0 count nowhere."""
    if use_triton(row_B):
        launch_count_sampled(state, row_B, token_BQ, num_accepted_B)
    else:
        count_sampled_ref(state, row_B, token_BQ, num_accepted_B + 1)


def launch_count_sampled(
    state: RequestState, row_B: Tensor, token_BQ: Tensor, num_accepted_B: Tensor
) -> None:
    B, Q = token_BQ.shape
    _count_sampled_kernel[(B,)](
        state.sampling.output_counts,
        row_B,
        token_BQ,
        num_accepted_B,
        token_BQ.stride(0),
        num_accepted_B.stride(0),
        state.sampling.vocab_size,
        Q=Q,
        num_warps=1,
        **launch_options(row_B),
    )


@jit
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
    let_the_next_start(PDL)
    wait_for_inputs(PDL)
    b = tl.program_id(0)
    row, num_accepted = tl.load(idx_ptr + b), tl.load(num_accepted_ptr + b * stride_accepted)
    for i in tl.static_range(Q):
        token = tl.load(tokens_ptr + b * stride_tokens + i)
        if (row >= 0) & (i <= num_accepted) & (token >= 0):
            tl.atomic_add(counts_ptr + row.to(tl.int64) * V + token, 1, sem="relaxed")
