"""Replace the target's choices, so that drafts hold as often as is asked.

The draft gives each node a share s of its parent's probability: the ratio of their paths'
probabilities, without the planner's factor of the odds, which would feed on itself. The best child
of a row holds with probability

    p = f s / (1 - s + f s), f by level,

and another child with REST (1 - p) s' / (1 - s), where s' is its own share: among themselves, the
others hold in the draft's proportions. These probabilities are intervals of [0, 1), side by side.
A number that depends on the row's token and position alone says which child the target's choice
becomes; beyond the last interval the choice stays as it was. So no two children of a row hold, and
a graph, a batch or padding changes nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, pick, tl
from specdec.kernels.gumbel import philox, philox_ref
from specdec.kernels.overlap import begin
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.state import RequestState
from specdec.sizes import DraftShape

# with this share trees of 16 rows accept as much as those of weights/demo_experts
REST = 0.3
TINY = 1e-30


def hold(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    shape: DraftShape,
    shared_rows: int,
    factors_2K: Tensor,
    odds_L: Tensor,
) -> None:
    """Rewrite buffers.target_tokens of a round, between the choice and the commit.

    num_reqs, shape, shared_rows: as commit_round has them
    factors_2K: float32, the planner's factors of the odds in probabilities of chains, by kind of
        request (greedy, sampled) and level
    odds_L: float32, f by level; the last one is for all further levels too
    """
    pick(buffers.target_tokens, launch_hold, hold_ref)(
        buffers, state, num_reqs, shape, shared_rows, factors_2K, odds_L
    )


def launch_hold(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    shape: DraftShape,
    shared_rows: int,
    factors_2K: Tensor,
    odds_L: Tensor,
) -> None:
    rows = buffers.target_tokens, buffers.input_ids, buffers.positions
    slots = buffers.verify_start_loc, buffers.num_valid, buffers.idx_mapping
    temperature = state.sampling.temperature
    X = state.draft_probs.shape[1]
    sizes = temperature.stride(0), X, factors_2K.shape[1], len(odds_L)
    _hold_kernel[(num_reqs,)](
        *(*rows, *slots, state.draft_parents, state.draft_probs, temperature, factors_2K, odds_L),
        *(*sizes, shape.rows, shared_rows, int(shape.is_wide)),
        ROWS=next_power_of_2(X + 1),
        TINY=TINY,
        REST=REST,
        num_warps=1,
        **launch_options(buffers.target_tokens),
    )


@jit(varying=("K", "L", "N", "shared_rows", "is_wide"))
def _hold_kernel(
    target_ptr,  # [T]
    input_ids_ptr,  # [T]
    positions_ptr,  # [T]
    starts_ptr,  # [B + 1] verify_start_loc, where rows are shared out
    num_valid_ptr,  # [B]
    idx_ptr,  # [B] idx_mapping
    parents_ptr,  # [R + 1, X], where nodes may be siblings
    probs_ptr,  # [R + 1, X] float32
    temperature_ptr,  # [R + 1] float32, of a row of several numbers
    factors_ptr,  # [2, K] float32
    odds_ptr,  # [L] float32
    stride_temperature,
    X,
    K,
    L,
    N,
    shared_rows,
    is_wide,
    ROWS: tl.constexpr,
    TINY: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0)
    idx = tl.load(idx_ptr + b)
    row = tl.maximum(idx, 0)
    first = tl.load(starts_ptr + b, mask=shared_rows > 0, other=b * N)
    num_valid = tl.where(idx >= 0, tl.load(num_valid_ptr + b), 0)
    i = tl.arange(0, ROWS)
    is_node = (i > 0) & (i < num_valid)
    nodes = row * X - 1  # of row 1, less 1
    parent = tl.load(parents_ptr + nodes + i, mask=is_node & (is_wide > 0), other=0)
    parent = tl.where(is_node & (is_wide == 0), i - 1, parent)
    path = tl.load(probs_ptr + nodes + i, mask=is_node, other=0.0)
    above = tl.load(probs_ptr + nodes + parent, mask=parent > 0, other=1.0)
    share = tl.minimum(path / tl.maximum(above, TINY), 1.0)
    start = tl.load(positions_ptr + first)
    depth = tl.load(positions_ptr + first + i, mask=is_node, other=0) - start
    level = tl.where(is_node, depth - 1, 0)
    is_drawn = (tl.load(temperature_ptr + row * stride_temperature) > 0.0).to(tl.int64)
    factor_at = factors_ptr + is_drawn * K + level
    factor = tl.load(factor_at, mask=is_node & (is_wide == 0), other=1.0)
    share = share / tl.maximum(share + factor * (1.0 - share), TINY)

    is_sibling = (parent[:, None] == parent[None, :]) & is_node[None, :]
    is_earlier = is_sibling & (i[None, :] < i[:, None])
    least = tl.min(tl.where(is_sibling, i[None, :], ROWS), axis=1)
    best = tl.sum(tl.where(i[None, :] == least[:, None], share[None, :], 0.0), axis=1)
    odds = tl.load(odds_ptr + tl.minimum(level, L - 1)) * best
    top = odds / tl.maximum(1.0 - best + odds, TINY)
    part = tl.where(least == i, top, REST * (1.0 - top) * share / tl.maximum(1.0 - best, TINY))
    begins = tl.sum(tl.where(is_earlier, part[None, :], 0.0), axis=1)
    token = tl.load(input_ids_ptr + first + parent, mask=is_node, other=0).to(tl.uint32)
    position = tl.load(positions_ptr + first + parent, mask=is_node, other=0).to(tl.uint32)
    zero = tl.zeros((ROWS,), tl.uint32)
    bits, _, _, _ = philox(token, zero, position, zero, zero, zero)
    number = (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    holds = is_node & (begins <= number) & (number < begins + part)
    draft = tl.load(input_ids_ptr + first + i, mask=holds, other=0)
    tl.store(target_ptr + first + parent, draft, mask=holds)


def hold_ref(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    shape: DraftShape,
    shared_rows: int,
    factors_2K: Tensor,
    odds_L: Tensor,
) -> None:
    N = shape.rows
    row_B = buffers.idx_mapping[:num_reqs]
    i_N = torch.arange(N, device=row_B.device)
    first_B1 = (torch.arange(num_reqs, device=row_B.device) * N)[:, None]
    if shared_rows:
        first_B1 = buffers.verify_start_loc[:num_reqs, None]
    num_valid_B = torch.where(row_B >= 0, buffers.num_valid[:num_reqs], 0)
    is_node_BN = (i_N > 0) & (i_N < num_valid_B[:, None])
    parent_BN = (i_N - 1).expand_as(is_node_BN)
    if shape.is_wide:
        parent_BN = F.pad(state.draft_parents[row_B, : N - 1], (1, 0))
    parent_BN = torch.where(is_node_BN, parent_BN, 0)
    at_BN = first_B1 + torch.where(is_node_BN, i_N, 0)
    above_BN = first_B1 + parent_BN
    depth_BN = buffers.positions[at_BN] - buffers.positions[first_B1]
    level_BN = torch.where(is_node_BN, depth_BN - 1, 0)
    path_BN = F.pad(state.draft_probs[row_B, : N - 1], (1, 0), value=1.0)
    share_BN = (path_BN / path_BN.gather(1, parent_BN).clamp(min=TINY)).clamp(max=1)
    share_BN = torch.where(is_node_BN, share_BN, 0)
    if not shape.is_wide:
        kind_B1 = (state.sampling.temperature[row_B] > 0).long()[:, None]
        share_BN = share_BN / (share_BN + factors_2K[kind_B1, level_BN] * (1 - share_BN))

    is_sibling_BNN = (parent_BN[:, :, None] == parent_BN[:, None, :]) & is_node_BN[:, None, :]
    is_earlier_BNN = is_sibling_BNN.tril(-1)
    least_BN = is_sibling_BNN.long().argmax(dim=2)
    best_BN = share_BN.gather(1, least_BN)
    odds_BN = odds_L[level_BN.clamp(max=len(odds_L) - 1)] * best_BN
    top_BN = odds_BN / (1 - best_BN + odds_BN).clamp(min=TINY)
    rest_BN = REST * (1 - top_BN) * share_BN / (1 - best_BN).clamp(min=TINY)
    part_BN = torch.where(least_BN == i_N, top_BN, rest_BN)
    begins_BN = torch.where(is_earlier_BNN, part_BN[:, None, :], 0).sum(dim=2)
    zero = torch.zeros_like(above_BN)
    key = buffers.input_ids[above_BN], zero
    bits_BN, *_ = philox_ref(key, (buffers.positions[above_BN], zero, zero, zero))
    number_BN = (bits_BN >> 8).float() * 2.0**-24
    holds_BN = is_node_BN & (begins_BN <= number_BN) & (number_BN < begins_BN + part_BN)
    buffers.target_tokens[above_BN[holds_BN]] = buffers.input_ids[at_BN[holds_BN]]
