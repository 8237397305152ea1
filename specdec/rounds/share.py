"""Which nodes get a row: the most probable of the whole batch.

Each request has the row of its last sampled token. What is left of the rows goes to the live nodes
with the greatest probability that they and all above them hold (state.draft_probs); of equals the
lower row is first, then the lower batch slot. A request gets as many rows as it has nodes among
these, and verifies its first ones: a node's row never comes before its parent's, so a node never
goes without its parent.
"""

import torch

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import begin
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.state import RequestState
from specdec.sizes import DraftShape

NODE_BITS, SLOT_BITS = 6, 13


def share_rows(
    buffers: StepBuffers, state: RequestState, num_reqs: int, shape: DraftShape, shared_rows: int
) -> None:
    """Write buffers.rows_per_slot: 0 for padding, else 1 and the slot's share of shared_rows.

    num_reqs: batch slots, padding included; at most shared_rows of them have a request
    shape: what each may verify, at most
    """
    most = len(buffers.rows_per_slot)
    assert shape.nodes <= 1 << NODE_BITS, shape
    assert most <= 1 << SLOT_BITS, most
    if not use_triton(buffers.idx_mapping):
        share_rows_ref(buffers, state, num_reqs, shape, shared_rows)
        return
    R, X = len(state.num_nodes) - 1, state.draft_tokens.shape[1]
    _share_rows_kernel[(num_reqs,)](
        *(buffers.rows_per_slot, buffers.idx_mapping, state.draft_probs, state.num_nodes),
        *(R, X, num_reqs, shared_rows),
        NODES=shape.nodes,
        NODES_PADDED=next_power_of_2(shape.nodes),
        SLOTS=next_power_of_2(most),
        NODE_BITS=NODE_BITS,
        SLOT_BITS=SLOT_BITS,
        num_warps=4,
        **launch_options(buffers.idx_mapping),
    )


@jit(varying=("B", "num_rows"))
def _share_rows_kernel(
    rows_per_slot_ptr,  # [B]
    idx_ptr,  # [B]
    probs_ptr,  # [R + 1, X] float32
    num_nodes_ptr,  # [R + 1]
    R,
    X,
    B,
    num_rows,
    NODES: tl.constexpr,
    NODES_PADDED: tl.constexpr,
    SLOTS: tl.constexpr,
    NODE_BITS: tl.constexpr,
    SLOT_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rank the nodes of one slot, in each program, among all nodes."""
    begin(PDL)
    me = tl.program_id(0)
    b = tl.arange(0, SLOTS)
    idx = tl.load(idx_ptr + b, mask=b < B, other=-1)
    row = tl.where(idx < 0, R, idx)
    num_live = tl.where(idx < 0, 0, tl.minimum(tl.load(num_nodes_ptr + row), NODES))
    num_left = num_rows - tl.sum((idx >= 0).to(tl.int32), axis=0)
    # the larger key goes first, and no two are equal; 0 where there is no node
    node = tl.arange(0, NODES_PADDED)
    is_live = node[:, None] < num_live[None, :]
    at = row[None, :] * X + node[:, None]
    prob = tl.load(probs_ptr + at, mask=is_live, other=0.0)
    # -0.0 equals 0.0
    bits = (prob + 0.0).to(tl.int32, bitcast=True).to(tl.int64) + 1
    order = (
        (((1 << NODE_BITS) - 1 - node[:, None]) << SLOT_BITS) + (1 << SLOT_BITS) - 1 - b[None, :]
    )
    keys = tl.where(is_live, (bits << (NODE_BITS + SLOT_BITS)) + order, 0)
    count = 0
    for i in range(NODES):
        is_own = (node[:, None] == i) & (b[None, :] == me)
        own = tl.sum(tl.sum(tl.where(is_own, keys, 0), axis=1), axis=0)
        num_before = tl.sum(tl.sum((keys > own).to(tl.int32), axis=1), axis=0)
        count += ((own > 0) & (num_before < num_left)).to(tl.int32)
    is_real = tl.load(idx_ptr + me) >= 0
    tl.store(rows_per_slot_ptr + me, tl.where(is_real, 1 + count, 0).to(tl.int64))


def share_rows_ref(
    buffers: StepBuffers, state: RequestState, num_reqs: int, shape: DraftShape, shared_rows: int
) -> None:
    B, X = num_reqs, shape.nodes
    row_B = buffers.idx_mapping[:B]
    node_X = torch.arange(X, device=row_B.device)
    num_live_B = torch.where(row_B >= 0, state.num_nodes[row_B], 0)
    is_live_XB = node_X[:, None] < num_live_B
    prob_XB = torch.where(is_live_XB, state.draft_probs[row_B, :X].t(), -1.0)
    # nodes, then slots, in order: a stable sort keeps it among equals
    order = prob_XB.flatten().sort(descending=True, stable=True).indices
    rank = torch.arange(X * B, device=row_B.device)
    rank_XB = torch.empty_like(order).scatter_(0, order, rank).view(X, B)
    num_left = shared_rows - (row_B >= 0).sum()
    count_B = (is_live_XB & (rank_XB < num_left)).sum(dim=0)
    buffers.rows_per_slot[:B] = torch.where(row_B >= 0, 1 + count_B, 0)
