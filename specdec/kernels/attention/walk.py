"""The kernel that walks the keys of query tiles, split by split.

A program takes all splits of its tile, adds them up and writes the rows. Or programs share them and
leave a partial result of each (combine.py): where there is one slot (several: shared_splits.py), or
where rows have paths. Their last keys lie elsewhere: programs of their own
attend to them (path_tails.py), and all leave partial results. Tiles of long slots may be left out
(shared_splits.py), and so may the shared keys of many such rows (wide_walk.py).
"""

from math import prod

from specdec.kernels import jit, next_power_of_2, tl
from specdec.kernels.attention.arguments import Pass
from specdec.kernels.attention.launch_plan import LEAST_ROWS, SMALL_KEY
from specdec.kernels.attention.parts import store_padding, store_part
from specdec.kernels.attention.path_tails import LONGEST, TailPrograms, attend_paths
from specdec.kernels.attention.shared_splits import is_shared
from specdec.kernels.attention.splits import (
    add_part,
    attend_all,
    attend_split,
    before_all,
    count_splits,
    first_block,
    first_seen,
    split_of,
    split_start,
)
from specdec.kernels.attention.tile_rows import (
    OF_SLOTS,
    keys_of,
    listed_tile,
    load_queries,
    positions_of_paths,
    rows_of_slot,
    rows_of_tile,
    state_row_of,
    tile_of,
)
from specdec.kernels.head_columns import columns, inside_columns
from specdec.kernels.needed import need
from specdec.kernels.overlap import begin_beside, end_beside, loaded_with
from specdec.kernels.repeated import Repeated


def prepare_walk(given: Pass) -> Repeated:
    """Prepare one program for each query tile and kv head, or as many as share its splits."""
    rows, plan, heads = given.rows, given.plan, given.heads
    in_one_loop = not plan.is_split and not plan.tile.skips_masks
    paths = rows.paths
    has_parts = plan.is_split or paths is not None  # in memory that earlier rows may still use
    is_beside = plan.is_helped or plan.is_wide or (rows.is_beside and not has_parts)
    sharers = min(given.most_splits, plan.sharers) if plan.is_split else 1
    cut = rows.idx_mapping if rows.listed is None else rows.listed
    grid = len(cut) * plan.tiles, heads.G, sharers
    path_len = 1 if paths is None else paths.slots.shape[1]
    tails = TailPrograms.of(rows.max_query_len, path_len, heads)
    num_tails = 0
    if paths is not None:
        assert path_len <= LONGEST, paths.slots.shape
        num_tails = len(rows.idx_mapping) * tails.of_slot * heads.G
        num_walks = 0 if plan.is_wide else prod(grid)
        grid = num_tails + num_walks, 1, 1
    path_tensors = (rows.positions,) * 2 if paths is None else (paths.slots, paths.starts)
    return Repeated(
        _paged_attention_kernel,
        grid,
        then=(
            *(*given.requests(), *path_tensors, path_len, num_tails, tails.of_slot, plan.tiles),
            *(*given.numbers(), *given.limits(), int(is_beside)),
            *(heads.window, *need().values(), rows.listed),
        ),
        constants={
            **given.constants,
            "IS_SPLIT": plan.is_split,
            "IS_UNIFORM": given.is_uniform,
            "IS_HELPED": plan.is_helped,
            "SLOTS": plan.slots,
            "GROUP": max(next_power_of_2(heads.group), LEAST_ROWS // plan.tokens),
            "TOKENS": plan.tokens,
            "HAS_PATHS": paths is not None,
            "IS_WIDE": plan.is_wide,
            "PATH_ROWS": tails.rows,
            "SHARED": given.constants["S"] if tails.are_shared else 0,
            "SKIP": plan.tile.skips_masks,
            "IN_ONE_LOOP": in_one_loop,
            "LOOKS_FIRST": plan.looks_first,
        },
        options={
            "num_warps": plan.walk_warps,
            "num_stages": 3 if in_one_loop and heads.key_bytes <= SMALL_KEY else 2,
            **({} if plan.most_registers is None else {"maxnreg": plan.most_registers}),
            **given.options,
        },
    )


OF_PATHS = "path_slots_ptr", "path_starts_ptr", "D1", "num_tails", "of_slot"


@jit(varying=(*OF_SLOTS, *OF_PATHS, "idx_ptr", "tiles", "is_beside", "window", "sinks_ptr"))
def _paged_attention_kernel(
    out_ptr,  # [T, H, C]
    q_ptr,  # [T, H, C]
    k_ptr,  # [N + 1, G, S, C]
    v_ptr,  # [N + 1, G, S, C]
    sinks_ptr,  # [H] float32, or None
    acc_ptr,  # [T, H, NS, C] float32, with IS_SPLIT or HAS_PATHS
    stats_ptr,  # [T, H, NS, 2] float32, with IS_SPLIT or HAS_PATHS: peak, total
    block_table_ptr,  # [R + 1, M]
    idx_ptr,  # [B]
    positions_ptr,  # [T]
    starts_ptr,  # [B + 1], without IS_UNIFORM
    path_slots_ptr,  # [T, D1], with HAS_PATHS as the next three
    path_starts_ptr,  # [B]
    D1,
    num_tails,  # programs for the last keys of paths; they come first
    of_slot,  # of these, for each kv head of a batch slot
    tiles,
    query_len,
    R,
    M,
    NS,
    scale,
    B,
    alone_keys,
    most,
    is_beside,  # 1: of rows beside others of the pass, or after wide_walk.py, see overlap.py
    window,  # keys that a row sees, or None: all
    needed_ptr,  # [1] or None; see needed.py
    listed_ptr,  # [X, 3] or None; see QueryRows
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    IS_HELPED: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    IS_WIDE: tl.constexpr,
    PATH_ROWS: tl.constexpr,
    SHARED: tl.constexpr,
    SKIP: tl.constexpr,
    IN_ONE_LOOP: tl.constexpr,
    LOOKS_FIRST: tl.constexpr,
):
    SIZES: tl.constexpr = (H, G, S, C)
    TILE: tl.constexpr = (GROUP, TOKENS)
    is_needed = True
    if needed_ptr is not None:
        is_needed = tl.load(needed_ptr, cache_modifier=".cg") != 0
    if HAS_PATHS:
        program, programs = tl.program_id(0), tl.num_programs(0)
        if IS_WIDE | (program < num_tails):  # with IS_WIDE all are
            b, piece, g = program // G // of_slot, program // G % of_slot, program % G
            row_start, row_end = rows_of_slot(b, starts_ptr, query_len, IS_UNIFORM)
            row = state_row_of(b, idx_ptr)
            path_start = tl.load(path_starts_ptr + b, cache_modifier=".cg").to(tl.int32)
            path = (
                keys_of(row, k_ptr, v_ptr, block_table_ptr, R, M),
                positions_ptr,
                path_slots_ptr,
                loaded_with(path_start, row),
                D1,
            )
            workspace = acc_ptr, stats_ptr, NS
            place = piece, row_start, row_end, g
            how = scale, is_needed, is_beside, window
            CUT: tl.constexpr = (IS_SPLIT, GROUP, PATH_ROWS, SHARED)
            attend_paths(place, q_ptr, workspace, path, how, SIZES, PDL, CUT)
            return
        program -= num_tails
        query_tile, g = program // G % (B * tiles), program % G
        turn = program // (B * tiles * G)
        sharers = (programs - num_tails) // (B * tiles * G)
    else:
        query_tile, g = tl.program_id(0), tl.program_id(1)
        turn = tl.program_id(2) if IS_SPLIT else 0
        sharers = tl.num_programs(2) if IS_SPLIT else 1
    slots = positions_ptr, starts_ptr, B, query_len
    b, tile = query_tile // tiles, query_tile % tiles
    if listed_ptr is not None:  # of the slot's rows those from the listed tile's first one on
        b, row_start, row_end = listed_tile(listed_ptr + 3 * b, starts_ptr, tiles * TOKENS)
    else:
        row_start, row_end = rows_of_slot(b, starts_ptr, query_len, IS_UNIFORM)
    first_row = row_start + tile * TOKENS
    keys = keys_of(state_row_of(b, idx_ptr), k_ptr, v_ptr, block_table_ptr, R, M)
    # Most programs that share splits have none. They end without waiting: the first of each tile
    # waits for all of them (overlap.py).
    if IS_SPLIT and LOOKS_FIRST:  # noqa: SIM102  # what is compiled
        if turn > 0:
            # all rows: after a slot's own there may be padding, at position 0
            row = first_row + tl.arange(0, TOKENS)
            is_row = row < row_end
            found = tl.load(positions_ptr + row, mask=is_row, other=-1, cache_modifier=".cg")
            if split_start(turn) > tl.max(found, axis=0):
                return
    is_busy = is_needed & (first_row < row_end)
    if IS_HELPED:  # noqa: SIM102  # what is compiled
        if is_busy:
            is_busy = is_shared(slots, row_start, row_end, alone_keys, most, IS_UNIFORM, SLOTS) == 0
    if HAS_PATHS:
        # only splits before the one in which paths begin: all rows see all of their keys. Padding
        # sees them, too, and of a tile of padding the first split is enough.
        t, head, inside = rows_of_tile(first_row, row_end, g, SIZES, TILE)
        position, first = None, None
        path_start = tl.load(path_starts_ptr + b, cache_modifier=".cg")
        last = split_start(split_of(path_start // S * S)) - 1
        row = first_row + tl.arange(0, TOKENS)
        found = tl.load(positions_ptr + row, mask=row < row_end, other=-1, cache_modifier=".cg")
        last = tl.where(tl.max(found, axis=0) < path_start, tl.minimum(last, S - 1), last)
        if window is not None:
            position, first = positions_of_paths(t, inside, positions_ptr, path_start)
    else:
        t, head, inside, position, first, last = tile_of(
            first_row, row_end, g, positions_ptr, window, SIZES, TILE
        )
    num_splits = None
    if window is not None:
        num_splits = count_splits(first, last, window)
    if IS_SPLIT:
        is_there = _has_split(turn, last, num_splits)
        if window is not None:  # rows of padding are left even where there is no split
            is_there = is_there | (turn == 0)
        is_busy = is_busy & is_there
        if not is_busy and turn > 0:
            return
    split = turn
    if IS_SPLIT:  # the longest ones first: at the end all programs are busy
        split = split_of(tl.maximum(last, 0)) - turn
    elif window is not None:
        split += split_of(first_seen(first, window))
    block = first_block(keys, split, first, last, window, S)
    begin_beside(is_beside, PDL)
    if not is_busy:
        end_beside(PDL)
        return
    q = load_queries(q_ptr, t, head, inside, H, C)
    parts = acc_ptr, stats_ptr, (t * H + head).to(tl.int64) * NS, inside
    peak, total, acc = before_all(sinks_ptr, head, inside, C)
    if IN_ONE_LOOP:
        whole = peak, total, acc
        peak, total, acc = attend_all(
            q, keys, position, first, last, whole, scale, g, window, SIZES
        )
    else:
        if IS_SPLIT and window is not None:  # noqa: SIM102  # what is compiled
            if turn == 0:
                # where paths begin in the first split, path_tails.py has them
                first_split = tl.where(last < 0, 0, split_of(first_seen(first, window)))
                store_padding(parts, positions_ptr, t, position, first_split, C)
        while _has_split(turn, last, num_splits):
            part_peak, part_total, part_acc = attend_split(
                q, keys, block, position, first, last, split, scale, g, window, SIZES, SKIP
            )
            if IS_SPLIT:
                store_part(parts, split, part_peak, part_total, part_acc, C)
                split -= sharers
            else:
                peak, total, acc = add_part(peak, total, acc, part_peak, part_total, part_acc)
                split += sharers
            turn += sharers
            block = first_block(keys, split, first, last, window, S)
    if HAS_PATHS and not IS_SPLIT:
        store_part(parts, 0, peak, total, acc, C)
    elif not IS_SPLIT:
        out_at = (t * H + head)[:, None] * C + columns(C)[None, :]
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at, out, mask=inside_columns(inside, C))
    end_beside(PDL)


@jit
def _has_split(turn, last, num_splits):
    """Whether there is a split for this turn. num_splits: that the rows see; None: all."""
    return split_start(turn) <= last if num_splits is None else turn < num_splits
