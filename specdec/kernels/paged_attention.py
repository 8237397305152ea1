"""Causal attention over a paged cache, in tiles and splits whose borders are absolute positions.

A row at position p reads keys 0..p of its request: tiles of 64 keys inside a split by online
softmax (arXiv 2112.05682), then the splits one after another by the same rule. Borders do not
depend on the other rows of the step, so neither does the row's result: a tile beyond a row's
position multiplies by 1 and adds 0. Values of keys beyond a tile's last row are read as 0, because
0 x NaN is NaN and unwritten slots may hold anything.

Splits are 64 keys up to position 1,024, then 256 up to 8,192, then 512: short contexts spread over
the GPU, long ones leave few partial results. In a round of few requests programs share the splits
of a query tile and a second kernel adds them up (attention_parts.py); in a prefill chunk, and where
the query tiles alone fill the GPU, one program walks all splits and writes no partial result. There
a round leaves the slots of more than ALONE_KEYS keys to two kernels after it, which share their
splits and add them up; without such slots both end at once (long_slots.py). All use the same
functions for a split and for adding one (attention_splits.py). Maxima are exact and totals come
from the tensor cores like the values, so nothing depends on how a tile lies across threads: a row
gets the same bits every way. That holds for query tiles of 64 rows and more too, which take wgmma:
tests/specdec/kernels/test_query_tiles.py asks a GPU.

Rows of a tree have their last keys in slots of their own: path_tails.py goes on with these.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import is_hopper, jit, launch_options, next_power_of_2, pick, tl
from specdec.kernels.attention_parts import PARTS_AT_ONCE, _combine_kernel, store_part
from specdec.kernels.attention_splits import (
    SPLITS_OF_ONE_TILE,
    add_part,
    attend_first_splits,
    attend_split,
    attend_tile_ref,
    no_keys,
    no_keys_ref,
    num_splits,
    split_of,
    split_start,
)
from specdec.kernels.head_columns import columns, inside_columns
from specdec.kernels.invariant import ROWS
from specdec.kernels.long_slots import _combine_long_kernel, _share_long_kernel, is_shared
from specdec.kernels.needed import need
from specdec.kernels.overlap import begin
from specdec.kernels.path_tails import (
    MIN_ROWS,
    Paths,
    _path_tails_kernel,
    path_tails_ref,
    paths_of_tiles,
)
from specdec.kernels.prompt_attention import PromptAttention, is_fit
from specdec.kernels.query_tiles import load_queries, rows_of_slot, tile_of
from specdec.kernels.repeated import Repeated

MAX_SPLIT_TOKENS = 16  # query tokens per request up to which programs share a query tile's splits
PROGRAMS = 1056  # enough to fill a GPU: 8 on each of 132 multiprocessors
# A slot with more is long: where the query tiles fill the GPU, other programs share its splits.
# None: no slot is long, and no kernel looks for one.
ALONE_KEYS: int | None = 4096
HELPERS = 264  # programs that share the splits of long slots: two a multiprocessor
COMBINERS = 264  # programs that add up what they leave
MIN_SLOTS = 256  # batch slots that a program looks at: at least this many, at powers of 2
# measured on an H200
AHEAD_STAGES = 5  # of a walk over all splits: two tiles of keys and values at a time
AHEAD_BYTES = 256  # of a key, where two tiles leave room for other programs
FULL = 128  # programs, query tiles x kv heads, that fill a GPU without sharing splits
FEW = 32  # programs up to which smaller tiles make more of them


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The rows of the step that form the twin's query tiles, and the batch slot of each tile."""

    rows: Tensor  # [tiles x 8] int64 row of the step, T = no row
    reqs: Tensor  # [tiles] int64 batch slot
    num_rows: int  # T


def plan_tiles(query_lens: Sequence[int], num_rows: int, device: torch.device) -> TilePlan:
    """Cut consecutive runs of rows, one per batch slot, into tiles of 8."""
    rows: list[int] = []
    reqs: list[int] = []
    start = 0
    for req, length in enumerate(query_lens):
        tiles = -(-length // ROWS)
        rows += [*range(start, start + length), *[num_rows] * (tiles * ROWS - length)]
        reqs += [req] * tiles
        start += length
    return TilePlan(torch.tensor(rows, device=device), torch.tensor(reqs, device=device), num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRows:
    """Where the query rows of a step are. Tensors are static buffers or slices of them.

    query_start_loc: None where all batch slots have max_query_len rows
    max_query_len:   host-side bound on the rows of a batch slot
    usual_query_len: rows of most batch slots, where they have any number up to the bound; None: it
    max_seq_len:     host-side bound on positions + 1
    paths:           None where each row's keys are all in its request's blocks
    """

    block_table: Tensor  # [R + 1, M] blocks by state row; the last row is scratch
    idx_mapping: Tensor  # [B] state row per batch slot, -1 = padding
    positions: Tensor  # [T] 0 = padding
    query_start_loc: Tensor | None = None  # [B + 1] first row of each batch slot
    max_query_len: int = 1
    usual_query_len: int | None = None
    max_seq_len: int
    tiles: TilePlan | None = None  # the twin's query tiles; None: by query_start_loc, each time
    paths: Paths | None = None
    workspace: Tensor | None = None  # float32, for partial results: see workspace_size
    # the kernels of each layer, once the first has been launched
    launches: list[Callable[..., None]] = field(
        default_factory=list, init=False, compare=False, repr=False
    )

    @property
    def num_rows(self) -> int:
        """Padding too."""
        return self.positions.shape[0]


def paged_attention(q_THC: Tensor, out_THC: Tensor, cache: Tensor, rows: QueryRows) -> None:
    """Overwrite the first rows of out_THC with their attention, as many as `rows` has.

    cache: [2, N + 1, G, S, C] of one layer
    """
    pick(q_THC, launch_paged_attention, paged_attention_ref)(q_THC, out_THC, cache, rows)


def workspace_size(num_rows: int, num_heads: int, head_dim: int, max_seq_len: int) -> int:
    """Elements for the partial results of so many rows: values, peak and total of each split."""
    return num_rows * num_heads * num_splits(max_seq_len) * (head_dim + 2)


class QueryTile(NamedTuple):
    """The query rows of a program, and its warps.

    more_than:    for passes whose longest batch slot has more query rows, tokens x heads of a group
    skips_masks:  tiles of keys that all rows see are not masked
    max_head_dim: only for types of 16 bits, and up to this head_dim; 0 = all
    """

    more_than: int
    rows: int
    num_warps: int
    skips_masks: bool = False
    max_head_dim: int = 0


# The only place that chooses tiles. Tests and scripts/tune_attention.py compare them with others.
QUERY_TILES = (
    QueryTile(0, 16, 4),
    QueryTile(16, 32, 4),
    QueryTile(32, 64, 4, skips_masks=True, max_head_dim=128),
)
PROMPT_TILES = tuple(
    QueryTile(1024, rows, num_warps, skips_masks)
    for rows, num_warps in ((64, 4), (64, 8), (128, 8))
    for skips_masks in (False, True)
)
# Batch slots with more query rows are prompt_attention.py's, where that can run; measured on an
# H200: at 512 (128 tokens of 4 heads) both take as long. None: none are.
PROMPT_MORE_THAN: int | None = 512


class Heads(NamedTuple):
    """group: query heads of each of the G kv heads."""

    group: int
    G: int
    C: int
    itemsize: int  # bytes of an element of queries and keys


def query_tile(query_rows: int, heads: Heads) -> QueryTile:
    """The last of QUERY_TILES that is meant for this many query rows of a batch slot."""
    return [tile for tile in QUERY_TILES if _is_meant(tile, query_rows, heads)][-1]


def _is_meant(tile: QueryTile, query_rows: int, heads: Heads) -> bool:
    fits = tile.max_head_dim == 0 or (heads.itemsize == 2 and tile.max_head_dim >= heads.C)
    return fits and tile.more_than < query_rows


class Launch(NamedTuple):
    """How the query rows of a pass are cut."""

    tile: QueryTile
    tokens: int  # of a query tile; its rows are tokens x heads of a group, at powers of 2
    tiles: int  # of a batch slot
    query_tiles: int  # of all batch slots
    usual_tiles: int  # of these, those that have rows, more or less
    is_split: bool  # programs share the splits of each query tile; else one walks them all
    is_helped: bool  # other programs share the splits of long slots
    slots: int  # batch slots that a helper looks at, at powers of 2; 1 without helpers

    @property
    def kind(self) -> tuple[QueryTile, bool, int]:
        """Launches of one kind, for the same heads, take the same kernels."""
        return self.tile, self.is_split, self.slots


def plan_launch(
    B: int,
    max_query_len: int,
    heads: Heads,
    has_paths: bool = False,
    usual_query_len: int | None = None,
    most_keys: int | None = None,
) -> Launch:
    """Of B batch slots.

    usual_query_len: as in QueryRows; tiles are made for it. most_keys: that a slot can have; None:
    any number
    """
    usual = usual_query_len or max_query_len
    is_round = max_query_len <= MAX_SPLIT_TOKENS
    tile = query_tile(usual * heads.group, heads)
    is_split = (is_round or has_paths) and _programs(B, usual, tile, heads) < _full(has_paths)
    if is_split and not has_paths:
        tile = _sharing_tile(B, usual, max_query_len, heads)
    tokens = _tokens(tile, heads)
    tiles, usual_tiles = -(-max_query_len // tokens), B * -(-usual // tokens)
    may_be_long = ALONE_KEYS is not None and (most_keys is None or most_keys > ALONE_KEYS)
    is_few = usual_tiles // B * heads.G < FULL  # a slot's own tiles do not fill the GPU
    is_helped = may_be_long and is_few and is_round and not has_paths and not is_split
    slots = max(next_power_of_2(B), MIN_SLOTS) if is_helped else 1
    return Launch(tile, tokens, tiles, B * tiles, usual_tiles, is_split, is_helped, slots)


def _sharing_tile(B: int, usual: int, most: int, heads: Heads) -> QueryTile:
    """Where programs share splits: many small tiles for few rows; else one for most of a slot's."""
    small = query_tile(1, heads)
    if _programs(B, usual, small, heads) <= FEW:
        return small
    return query_tile(min(2 * usual, most) * heads.group, heads)


def _programs(B: int, query_len: int, tile: QueryTile, heads: Heads) -> int:
    """Query tiles x kv heads."""
    return B * -(-query_len // _tokens(tile, heads)) * heads.G


def _tokens(tile: QueryTile, heads: Heads) -> int:
    """Of a slot, in a query tile."""
    return max(tile.rows // next_power_of_2(heads.group), 1)


def most_rows_in_parts(
    max_query_len: int, max_slots: int, heads: Heads, has_paths: bool = False
) -> int:
    """Of a round whose programs share splits, with up to so many batch slots."""
    longest = max_query_len if has_paths else min(max_query_len, MAX_SPLIT_TOKENS)
    most = 0
    for Q in range(1, longest + 1):
        of_slot = _programs(1, Q, query_tile(Q * heads.group, heads), heads)
        most = max(most, Q * min((_full(has_paths) - 1) // of_slot, max_slots))
    return most


def _full(has_paths: bool) -> int:
    """Programs that fill a GPU; with paths as many as before walks were made to prefetch keys."""
    return 2 * FULL if has_paths else FULL


def launch_paged_attention(q_THC: Tensor, out_THC: Tensor, cache: Tensor, rows: QueryRows) -> None:
    if not rows.launches:
        rows.launches.extend(_launches(q_THC, cache, rows))
    tensors = out_THC, q_THC, *cache.unbind()
    for each in rows.launches:
        each(*tensors)


def takes_prompt_kernel(
    rows: QueryRows, group: int, S: int, C: int, dtype: torch.dtype, has_wgmma: bool
) -> bool:
    """Whether prompt_attention.py serves a pass. Its bits are the same, so its size may decide."""
    if PROMPT_MORE_THAN is None or rows.max_query_len <= MAX_SPLIT_TOKENS:
        return False
    is_large = rows.max_query_len * group > PROMPT_MORE_THAN
    return is_large and has_wgmma and rows.paths is None and is_fit(group, S, C, dtype)


def _launches(q_THC: Tensor, cache: Tensor, rows: QueryRows) -> list[Callable[..., None]]:
    """The kernels of each layer of a pass, whichever serves it."""
    _, _, G, S, C = cache.shape
    group = q_THC.shape[1] // G
    if not takes_prompt_kernel(rows, group, S, C, q_THC.dtype, is_hopper(q_THC.device)):
        return _prepare(q_THC, cache, rows)
    table = rows.block_table, rows.idx_mapping, rows.positions, rows.query_start_loc
    return [PromptAttention(q_THC, cache, *table, rows.max_query_len)]


def _prepare(q_THC: Tensor, cache: Tensor, rows: QueryRows) -> list[Callable[..., None]]:
    """The kernels of each layer of a pass."""
    _, H, C = q_THC.shape
    _, _, G, S, _ = cache.shape
    B = len(rows.idx_mapping)
    heads = Heads(H // G, G, C, q_THC.element_size())
    plan = plan_launch(
        B,
        rows.max_query_len,
        heads,
        has_paths=rows.paths is not None,
        usual_query_len=rows.usual_query_len,
        most_keys=rows.block_table.shape[1] * S,
    )
    parts = _room_for_parts(rows, plan, H, C, q_THC.device)
    # Round where the source rounds. A tile without a mask would otherwise have its scale fused with
    # the subtraction of the peak, and other bits than the same tile with one.
    options = {**launch_options(q_THC), "enable_fp_fusion": False}
    constants = {"H": H, "G": G, "S": S, "C": C, "PDL": options["PDL"]}
    given = rows, plan, parts, heads, constants, options
    attend = _attention_launch(*given)
    if rows.paths is not None:
        return [attend, _tails_launch(*given)]
    if plan.is_split:
        combine = _combine_launch(*given)
        return [attend, lambda out, *_: combine(out)]
    if not plan.is_helped:
        return [attend]
    share, combine = _share_long_launch(*given), _combine_long_launch(*given)
    return [attend, lambda _, *tensors: share(*tensors), lambda out, *_: combine(out)]


class Parts(NamedTuple):
    """Room for partial results: of every row of a pass, or of the rows of its first long slots."""

    acc: Tensor  # [rows, H, num_splits, C] float32, and all else
    stats: Tensor  # [rows, H, num_splits, 2] float32
    num_splits: int
    num_long: int  # long slots whose rows have room


def _room_for_parts(rows: QueryRows, plan: Launch, H: int, C: int, device: torch.device) -> Parts:
    """In the workspace; where rows need more than it has, in memory of its own."""
    splits = num_splits(rows.max_seq_len)
    num_rows, num_long = rows.num_rows, 0
    if plan.is_helped:
        num_long = _long_slots_with_room(rows, H, C)
        num_rows = num_long * rows.max_query_len
    elif not plan.is_split:  # one program for all splits leaves two to a kernel that goes on
        splits = 2 if rows.paths is not None else 0
    size = max(num_rows * H * splits * (C + 2), 1)
    acc = rows.workspace
    if acc is None or acc.numel() < size:
        acc = torch.empty(size, dtype=torch.float32, device=device)
    return Parts(acc, acc[num_rows * H * splits * C :], splits, num_long)


def _long_slots_with_room(rows: QueryRows, H: int, C: int) -> int:
    """As many as the workspace holds; without one, all."""
    B = len(rows.idx_mapping)
    if rows.workspace is None:
        return B
    size = workspace_size(rows.max_query_len, H, C, rows.max_seq_len)
    return min(B, rows.workspace.numel() // size)


def _attention_launch(
    rows: QueryRows,
    plan: Launch,
    parts: Parts,
    heads: Heads,
    constants: Mapping[str, object],
    options: Mapping[str, object],
) -> Repeated:
    sharers = -(-PROGRAMS // (plan.usual_tiles * heads.G))
    walks = not plan.is_split and rows.paths is None and not plan.tile.skips_masks
    has_room = heads.C * heads.itemsize <= AHEAD_BYTES
    return Repeated(
        _paged_attention_kernel,
        (
            plan.query_tiles,
            heads.G,
            min(parts.num_splits, sharers) if plan.is_split else 1,
        ),
        then=(
            *_requests(rows, parts),
            rows.positions if rows.paths is None else rows.paths.starts,
            plan.tiles,
            *_numbers(rows, parts, heads),
            *_limits(rows, parts),
            *need().values(),
        ),
        constants={
            **constants,
            "IS_SPLIT": plan.is_split,
            "IS_UNIFORM": rows.query_start_loc is None,
            "IS_HELPED": plan.is_helped,
            "SLOTS": plan.slots,
            "GROUP": next_power_of_2(heads.group),
            "TOKENS": plan.tokens,
            "HAS_PATHS": rows.paths is not None,
            "SKIP": plan.tile.skips_masks,
            "AHEAD": SPLITS_OF_ONE_TILE if walks else 0,
        },
        options={
            "num_warps": plan.tile.num_warps,
            "num_stages": AHEAD_STAGES if walks and has_room else 2,
            **options,
        },
    )


def _tails_launch(
    rows: QueryRows,
    plan: Launch,
    parts: Parts,
    heads: Heads,
    constants: Mapping[str, object],
    options: Mapping[str, object],
) -> Repeated:
    paths = rows.paths
    assert paths is not None
    return Repeated(
        _path_tails_kernel,
        (len(rows.idx_mapping) * rows.max_query_len, heads.G, 1),
        then=(
            *_requests(rows, parts),
            paths.slots,
            paths.starts,
            paths.slots.shape[1],
            *_numbers(rows, parts, heads),
            *need().values(),
        ),
        constants={
            **constants,
            "IS_SPLIT": plan.is_split,
            "IS_UNIFORM": rows.query_start_loc is None,
            "ROWS": max(next_power_of_2(heads.group), MIN_ROWS),
            "AT_ONCE": PARTS_AT_ONCE,
        },
        options={"num_warps": 4, "num_stages": 2, **options},
    )


def _combine_launch(
    rows: QueryRows,
    plan: Launch,
    parts: Parts,
    heads: Heads,
    constants: Mapping[str, object],
    options: Mapping[str, object],
) -> Repeated:
    return Repeated(
        _combine_kernel,
        (rows.num_rows, heads.group * heads.G, 1),
        then=(parts.acc, parts.stats, rows.positions, parts.num_splits, *need().values()),
        constants={**constants, "AT_ONCE": PARTS_AT_ONCE},
        options={"num_warps": 1, **options},
    )


def _share_long_launch(
    rows: QueryRows,
    plan: Launch,
    parts: Parts,
    heads: Heads,
    constants: Mapping[str, object],
    options: Mapping[str, object],
) -> Repeated:
    return Repeated(
        _share_long_kernel,
        (HELPERS, 1, 1),
        then=(
            *_requests(rows, parts),
            plan.tiles,
            *_numbers(rows, parts, heads),
            *_limits(rows, parts),
            *need().values(),
        ),
        constants={
            **constants,
            "IS_UNIFORM": rows.query_start_loc is None,
            "SLOTS": plan.slots,
            "GROUP": next_power_of_2(heads.group),
            "TOKENS": plan.tokens,
            "SKIP": plan.tile.skips_masks,
        },
        options={"num_warps": 4, "num_stages": 2, **options},
    )


def _combine_long_launch(
    rows: QueryRows,
    plan: Launch,
    parts: Parts,
    heads: Heads,
    constants: Mapping[str, object],
    options: Mapping[str, object],
) -> Repeated:
    num_heads = next_power_of_2(heads.group)
    acc, stats, _, _, positions, starts = _requests(rows, parts)
    return Repeated(
        _combine_long_kernel,
        (COMBINERS, 1, 1),
        then=(
            acc,
            stats,
            positions,
            starts,
            rows.max_query_len,
            parts.num_splits,
            *_limits(rows, parts),
            *need().values(),
        ),
        constants={
            **constants,
            "IS_UNIFORM": rows.query_start_loc is None,
            "SLOTS": plan.slots,
            "HEADS": num_heads,
            "AT_ONCE": PARTS_AT_ONCE,
        },
        options={"num_warps": min(num_heads, 4), **options},
    )


def _requests(rows: QueryRows, parts: Parts) -> tuple[Tensor, ...]:
    """Their partial results, blocks, places and rows."""
    starts = rows.positions if rows.query_start_loc is None else rows.query_start_loc
    return parts.acc, parts.stats, rows.block_table, rows.idx_mapping, rows.positions, starts


def _numbers(rows: QueryRows, parts: Parts, heads: Heads) -> tuple[int | float, ...]:
    R, M = rows.block_table.shape
    # times log2(e): the kernels take powers of 2
    return rows.max_query_len, R - 1, M, parts.num_splits, heads.C**-0.5 * 1.4426950408889634


def _limits(rows: QueryRows, parts: Parts) -> tuple[int, ...]:
    """What tells long slots: see long_slots.py. Without helpers no kernel looks at it."""
    return len(rows.idx_mapping), ALONE_KEYS or 0, parts.num_long


@jit(
    varying=(
        "idx_ptr",
        "positions_ptr",
        "starts_ptr",
        "path_starts_ptr",
        "tiles",
        "query_len",
        "NS",
        "B",
        "alone_keys",
        "most",
    )
)
def _paged_attention_kernel(
    out_ptr,  # [T, H, C]
    q_ptr,  # [T, H, C]
    k_ptr,  # [N + 1, G, S, C]
    v_ptr,  # [N + 1, G, S, C]
    acc_ptr,  # [T, H, NS, C] float32, with IS_SPLIT or HAS_PATHS
    stats_ptr,  # [T, H, NS, 2] float32, with IS_SPLIT or HAS_PATHS: peak, total
    block_table_ptr,  # [R + 1, M]
    idx_ptr,  # [B]
    positions_ptr,  # [T]
    starts_ptr,  # [B + 1], without IS_UNIFORM
    path_starts_ptr,  # [B], with HAS_PATHS
    tiles,
    query_len,
    R,
    M,
    NS,
    scale,
    B,
    alone_keys,
    most,
    needed_ptr,  # [1] or None; see needed.py
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
    SKIP: tl.constexpr,
    AHEAD: tl.constexpr,
):
    begin(PDL)
    if needed_ptr is not None:  # noqa: SIM102  # what is compiled
        if tl.load(needed_ptr) == 0:
            return
    b, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    g = tl.program_id(1)
    split = tl.program_id(2) if IS_SPLIT else 0
    sharers = tl.num_programs(2) if IS_SPLIT else 1
    slots = positions_ptr, starts_ptr, B, query_len
    row_start, row_end = rows_of_slot(b, starts_ptr, query_len, IS_UNIFORM)
    if row_start + tile * TOKENS >= row_end:
        return
    if IS_HELPED:  # noqa: SIM102  # what is compiled
        if is_shared(slots, row_end, alone_keys, most, IS_UNIFORM, SLOTS):
            return
    t, head, inside, position, first, last = tile_of(
        row_start + tile * TOKENS, row_end, g, positions_ptr, H, G, GROUP, TOKENS
    )
    if HAS_PATHS:  # only whole tiles of shared keys
        path_tile = tl.load(path_starts_ptr + b) // S * S
        last = tl.minimum(last, path_tile - 1)
    if IS_SPLIT and split_start(split) > last:
        return
    memory = q_ptr, k_ptr, v_ptr, block_table_ptr, idx_ptr, R, M
    q, keys = load_queries(b, t, head, inside, memory, H, C)
    if AHEAD > 0:
        peak, total, acc = attend_first_splits(q, keys, position, last, scale, g, G, S, C, AHEAD)
        split += AHEAD
    else:
        peak, total, acc = no_keys(TOKENS * GROUP, C)
    parts = acc_ptr, stats_ptr, (t * H + head).to(tl.int64) * NS, inside
    end_of_walk = last + 1
    if HAS_PATHS and not IS_SPLIT:  # path_tails.py goes on in the split of path_tile
        end_of_walk = tl.minimum(end_of_walk, split_start(split_of(path_tile)))
    while split_start(split) < end_of_walk:
        part_peak, part_total, part_acc = attend_split(
            q, keys, position, first, last, split, scale, g, G, S, C, SKIP
        )
        if IS_SPLIT:
            store_part(parts, split, part_peak, part_total, part_acc, C)
        else:
            peak, total, acc = add_part(peak, total, acc, part_peak, part_total, part_acc)
        split += sharers
    if HAS_PATHS and not IS_SPLIT:
        store_part(parts, 0, peak, total, acc, C)
        peak, total, acc = attend_split(
            q, keys, position, first, last, split, scale, g, G, S, C, SKIP
        )
        store_part(parts, 1, peak, total, acc, C)
    elif not IS_SPLIT:
        out_at = (t * H + head)[:, None] * C + columns(C)[None, :]
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at, out, mask=inside_columns(inside, C))


def _tiles_of(rows: QueryRows) -> TilePlan:
    """The tiles of ragged rows, in as many for each batch slot as the longest may need."""
    starts = rows.query_start_loc
    assert starts is not None, "the twin needs a tile plan, or query_start_loc"
    per_slot = -(-rows.max_query_len // ROWS)
    i_X = torch.arange(per_slot * ROWS, device=starts.device)
    row_BX = starts[:-1, None] + i_X
    row_BX = torch.where(row_BX < starts[1:, None], row_BX, rows.num_rows)
    req_B = torch.arange(len(starts) - 1, device=starts.device)
    return TilePlan(row_BX.flatten(), req_B.repeat_interleave(per_slot), rows.num_rows)


def paged_attention_ref(q_THC: Tensor, out_THC: Tensor, cache: Tensor, rows: QueryRows) -> None:
    """In tiles of 8 query rows of one request, by rows.tiles; rows in no tile become 0."""
    tiles = rows.tiles or _tiles_of(rows)
    q_THC, out_THC = q_THC[: rows.num_rows], out_THC[: rows.num_rows]
    _, _, G, S, C = cache.shape
    H = q_THC.shape[1]
    NT = len(tiles.reqs)
    q = F.pad(q_THC.float() * C**-0.5, (0, 0, 0, 0, 0, 1))[tiles.rows].view(NT, ROWS, G, H // G, C)
    q = q.permute(0, 2, 3, 1, 4).reshape(NT * G, H // G * ROWS, C)
    position = F.pad(rows.positions, (0, 1))[tiles.rows].view(NT, 1, 1, ROWS, 1)
    last = position.amax(dim=3, keepdim=True)
    block_table_NM = rows.block_table[rows.idx_mapping[tiles.reqs]]
    paths = None if rows.paths is None else paths_of_tiles(rows.paths, tiles.rows, tiles.reqs)
    if paths is not None:  # only whole tiles of shared keys
        last = torch.minimum(last, paths.starts.view(NT, 1, 1, 1, 1) // S * S - 1)
    last_shared = torch.minimum(position, last)
    part = no_keys_ref(q, NT, G, H // G)
    for tile in range(-(-rows.max_seq_len // S)):
        key = torch.arange(tile * S, (tile + 1) * S, device=q.device)
        k, v = cache[:, block_table_NM[:, tile]].float().unbind(0)  # [NT, G, S, C] each
        part = attend_tile_ref(q, k, v, key <= last, key <= last_shared, part)
    if paths is not None:
        part = path_tails_ref(q, cache, block_table_NM, position, paths, part)
    finished = (part.acc / part.total).permute(0, 3, 1, 2, 4).reshape(NT * ROWS, H, C)
    padded = out_THC.new_zeros(tiles.num_rows + 1, H, C)
    padded[tiles.rows] = finished.to(out_THC.dtype)
    out_THC.copy_(padded[:-1])
