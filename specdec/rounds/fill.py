"""The rows of a round, laid out in the static buffers: each slot's root and its live nodes.

Row 0 of a slot is its request's last sampled token, at its own place in the request's blocks; row i
is node i of what was drafted after it (state.py). A chain's nodes lie at the places of their
positions. Where nodes may be siblings, which share a position, they lie in scratch slots after the
pool, and each row has a path: the rows and cache slots of its ancestors, and its own.

A row is padding (token 0, position 0, cache slot -1) if its slot is empty, its node is not live, or
the context is full. Its path is the root alone, since attention over no key would give NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import begin
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.state import RequestState
from specdec.sizes import BLOCK_SIZE, DraftShape


def fill_round(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    shape: DraftShape,
    shared_rows: int,
    max_model_len: int,
) -> None:
    """Gather the rows of each batch slot from the state by buffers.idx_mapping.

    num_reqs:    batch slots, padding included
    shape:       what each slot has rows for, at most
    shared_rows: rows of all slots, shared out among them by rows_per_slot; 0: each has shape.rows
    """
    assert not (shape.is_wide and shared_rows), (shape, shared_rows)
    if not use_triton(buffers.idx_mapping):
        fill_round_ref(buffers, state, num_reqs, shape, shared_rows, max_model_len)
        return
    filled = buffers.input_ids, buffers.positions, buffers.slot_mapping, buffers.num_valid
    decided = buffers.sample_mapping, buffers.sample_states, buffers.sample_starts
    shared = buffers.draft_input_ids, buffers.verify_start_loc, buffers.rows_per_slot
    paths = buffers.path_rows, buffers.path_slots, buffers.path_starts
    roots = buffers.idx_mapping, state.last_sampled_tokens, state.num_computed_tokens
    nodes = state.draft_tokens, state.draft_parents, state.num_nodes
    R, M = state.block_table.shape
    sizes = R - 1, M, state.draft_tokens.shape[1], num_reqs, shared_rows, max_model_len
    _fill_round_kernel[(num_reqs + (shared_rows > 0),)](
        *(*filled, *decided, *shared, *paths, *roots, *nodes, state.block_table),
        *(*sizes, buffers.sizes.first_node_slot),
        N=shape.rows,
        N_PADDED=next_power_of_2(shape.rows),
        SHARES=next_power_of_2(len(buffers.rows_per_slot)) if shared_rows else 0,
        HAS_PATHS=shape.is_wide,
        D1=buffers.path_rows.shape[1],
        S=BLOCK_SIZE,
        num_warps=1,
        **launch_options(buffers.idx_mapping),
    )


@jit(varying=("B", "shared_rows"))
def _fill_round_kernel(
    input_ids_ptr,  # [T]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    num_valid_ptr,  # [B]
    sample_ptr,  # [B]
    states_ptr,  # [T] sample_states
    first_rows_ptr,  # [T] sample_starts
    draft_ids_ptr,  # [T], with SHARES as the next two
    starts_ptr,  # [B + 1] verify_start_loc
    rows_per_slot_ptr,  # [B]
    path_rows_ptr,  # [T, D1], with HAS_PATHS as the next two
    path_slots_ptr,  # [T, D1]
    path_starts_ptr,  # [B]
    idx_ptr,  # [B]
    last_sampled_ptr,  # [R + 1]
    num_computed_ptr,  # [R + 1]
    tokens_ptr,  # [R + 1, X]
    parents_ptr,  # [R + 1, X], with HAS_PATHS
    num_nodes_ptr,  # [R + 1]
    block_table_ptr,  # [R + 1, M]
    R,
    M,
    X,
    B,
    shared_rows,
    max_model_len,
    first_node_slot,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    SHARES: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    D1: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0)
    i = tl.arange(0, N_PADDED)
    first = b * N
    count = N
    if SHARES > 0:
        slot = tl.arange(0, SHARES)
        earlier = tl.load(rows_per_slot_ptr + slot, mask=slot < tl.minimum(b, B), other=0)
        first = tl.sum(earlier, axis=0).to(tl.int32)
        tl.store(starts_ptr + b, first.to(tl.int64))
        if b == B:  # rows that no slot takes
            for start in range(first, shared_rows, N_PADDED):
                is_left = start + i < shared_rows
                zero = tl.zeros((N_PADDED,), tl.int64)
                tl.store(input_ids_ptr + start + i, zero, mask=is_left)
                tl.store(positions_ptr + start + i, zero, mask=is_left)
                tl.store(draft_ids_ptr + start + i, zero, mask=is_left)
                tl.store(first_rows_ptr + start + i, zero, mask=is_left)
                tl.store(slots_ptr + start + i, zero - 1, mask=is_left)
                tl.store(states_ptr + start + i, zero - 1, mask=is_left)
            return
        count = tl.load(rows_per_slot_ptr + b).to(tl.int32)
    inside = i < count
    idx = tl.load(idx_ptr + b)
    row = tl.where(idx < 0, R, idx)
    start = tl.load(num_computed_ptr + row)
    has_root = (idx >= 0) & (start < max_model_len)
    last = tl.where(has_root, tl.minimum(tl.load(num_nodes_ptr + row), count - 1), -1)
    is_live = i <= last
    nodes = row * X - 1  # of row 1, less 1
    node = tl.load(tokens_ptr + nodes + i, mask=is_live & (i > 0), other=0)
    token = tl.where(i == 0, tl.load(last_sampled_ptr + row), node)
    depth = tl.zeros((N_PADDED,), tl.int64)
    if HAS_PATHS:
        above = tl.where(is_live, i, 0).to(tl.int64)
        for _ in range(1, D1):
            depth += (above > 0).to(tl.int64)
            above = tl.load(parents_ptr + nodes + above, mask=above > 0, other=0)
    else:
        depth += i
    position = start + depth
    at = first + i
    if HAS_PATHS:
        block = tl.load(block_table_ptr + row * M + start // S, mask=has_root, other=0)
        # a slot without a request reads one key, whatever it holds: with none it would get NaN
        root_slot = tl.where(has_root, block * S + start % S, first_node_slot)
        node_slots = first_node_slot + b * X - 1  # of row 1, less 1
        slot = tl.where(i == 0, root_slot, node_slots + i)
        tl.store(path_starts_ptr + b, tl.where(has_root, start, 0))
        above = tl.where(is_live, i, 0).to(tl.int64)
        for behind in range(D1):
            level = D1 - 1 - behind
            is_above = level <= depth
            path_slot = tl.where(above > 0, node_slots + above, root_slot)
            path_at = at * D1 + level
            tl.store(path_rows_ptr + path_at, tl.where(is_above, first + above, -1), mask=inside)
            tl.store(path_slots_ptr + path_at, tl.where(is_above, path_slot, -1), mask=inside)
            is_node = is_above & (above > 0)
            above = tl.load(parents_ptr + nodes + above, mask=is_node, other=above)
    else:
        block = tl.load(block_table_ptr + row * M + position // S, mask=is_live, other=0)
        slot = block * S + position % S
    tl.store(input_ids_ptr + at, tl.where(is_live, token, 0), mask=inside)
    tl.store(positions_ptr + at, tl.where(is_live, position, 0), mask=inside)
    tl.store(slots_ptr + at, tl.where(is_live, slot, -1), mask=inside)
    tl.store(states_ptr + at, tl.where(is_live, idx, -1), mask=inside)
    tl.store(first_rows_ptr + at, tl.zeros_like(depth) + first, mask=inside)
    tl.store(num_valid_ptr + b, last + 1)
    tl.store(sample_ptr + b, idx)


def fill_round_ref(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    shape: DraftShape,
    shared_rows: int,
    max_model_len: int,
) -> None:
    B = num_reqs
    T = shared_rows or B * shape.rows
    row_B = buffers.idx_mapping[:B]  # -1 for padding, which reads the last row: the scratch row
    counts_B = torch.full_like(row_B, shape.rows)
    if shared_rows:
        counts_B = buffers.rows_per_slot[:B]
    starts = torch.cat([torch.zeros_like(row_B[:1]), counts_B.cumsum(dim=0)])
    t_T = torch.arange(T, device=row_B.device)
    slot_T = torch.searchsorted(starts[1:], t_T, right=True)  # B: a row that no slot takes
    row_T = F.pad(row_B, (0, 1), value=-1)[slot_T]
    first_T = torch.where(slot_T < B, starts[slot_T], 0)
    i_T = t_T - first_T
    has_root_T = (row_T >= 0) & (state.num_computed_tokens[row_T] < max_model_len)
    is_live_T = has_root_T & (i_T <= state.num_nodes[row_T])
    live_T = torch.where(is_live_T, i_T, 0)
    depth_T = live_T
    if shape.is_wide:
        path_TD = _paths(state, row_T, live_T, buffers.path_rows.shape[1])
        depth_T = (path_TD >= 0).sum(dim=1) - 1
    position_T = state.num_computed_tokens[row_T] + depth_T
    slots_T = state.slots(position_T, row_T, is_live_T & (not shape.is_wide or i_T == 0))
    if shape.is_wide:
        node_slot_T = buffers.sizes.first_node_slot - 1 + slot_T * state.draft_tokens.shape[1]
        slots_T = torch.where(is_live_T & (i_T > 0), node_slot_T + i_T, slots_T)
        # a slot without a request reads one key, whatever it holds: with none it would get NaN
        root_T = torch.where(has_root_T, slots_T[first_T], buffers.sizes.first_node_slot)
        path_slot_TD = torch.where(path_TD > 0, node_slot_T[:, None] + path_TD, root_T[:, None])
        buffers.path_slots[:T] = torch.where(path_TD >= 0, path_slot_TD, -1)
        buffers.path_rows[:T] = torch.where(path_TD >= 0, path_TD + first_T[:, None], -1)
        buffers.path_starts[:B] = torch.where(has_root_T, position_T, 0)[starts[:-1]]
    tokens = torch.cat([state.last_sampled_tokens[:, None], state.draft_tokens], dim=1)
    buffers.input_ids[:T] = torch.where(is_live_T, tokens[row_T, live_T], 0)
    buffers.positions[:T] = torch.where(is_live_T, position_T, 0)
    buffers.slot_mapping[:T] = slots_T
    buffers.sample_states[:T] = torch.where(is_live_T, row_T, -1)
    buffers.sample_starts[:T] = first_T
    num_valid = torch.zeros_like(starts).index_add_(0, slot_T, is_live_T.long())
    buffers.num_valid[:B] = num_valid[:B]
    buffers.sample_mapping[:B] = row_B
    if shared_rows:
        buffers.verify_start_loc[: B + 1] = starts
        buffers.draft_input_ids[:T].masked_fill_(slot_T == B, 0)


def _paths(state: RequestState, row_T: Tensor, node_T: Tensor, path_len: int) -> Tensor:
    """List the path [T, D + 1] of each row: rows of its slot from the root to it, then -1."""
    parents = F.pad(state.draft_parents, (1, 0))  # the root's is itself
    above = [node_T]
    for _ in range(1, path_len):
        above.append(parents[row_T, above[-1]])
    above_TD = torch.stack(above[::-1], dim=1)
    depth_T1 = (above_TD > 0).sum(dim=1, keepdim=True)
    level_D = torch.arange(path_len, device=node_T.device)
    from_TD = (level_D + path_len - 1 - depth_T1).clamp(max=path_len - 1)
    return torch.where(level_D <= depth_T1, above_TD.gather(1, from_TD), -1)
