"""Causal attention over a paged cache, in tiles and splits whose borders are absolute positions.

A row at position p reads keys 0..p of its request: tiles of 64 keys inside a split by online
softmax (arXiv 2112.05682), then the splits one after another by the same rule. Borders do not
depend on the other rows of the step, so neither does the row's result: a tile beyond a row's
position multiplies by 1 and adds 0. Values of keys beyond a tile's last row are read as 0, because
0 x NaN is NaN and unwritten slots may hold anything.

Splits are 64 keys up to position 1,024, then 512 up to 8,192, then 2,048: short contexts spread
over the GPU, long ones leave few partial results. In a round of few requests programs share the
splits of a query tile and a second kernel adds them up; in a prefill chunk, and where the query
tiles alone fill the GPU, one program walks all splits and writes no partial result. Both use the
same functions for a split and for adding one (attention_splits.py). Maxima are exact and totals
come from the tensor cores like the values, so nothing depends on how a tile lies across threads: a
row gets the same bits both ways. Query tiles have 16 or 32 rows; whether larger ones, which take
wgmma, sum in the same order is what tests/specdec/kernels/test_query_tiles.py asks a GPU.

Rows of a tree have their last keys in slots of their own: path_tails.py goes on with these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import is_hopper, jit, launch_options, next_power_of_2, pick, tl
from specdec.kernels.attention_splits import (
    add_part,
    attend_split,
    attend_tile_ref,
    no_keys,
    no_keys_ref,
    num_splits,
    split_of,
    split_start,
    weigh,
)
from specdec.kernels.invariant import ROWS
from specdec.kernels.overlap import begin
from specdec.kernels.path_tails import (
    MIN_ROWS,
    Paths,
    _path_tails_kernel,
    path_tails_ref,
    paths_of_tiles,
    store_part,
)
from specdec.kernels.prompt_attention import PromptAttention, is_fit
from specdec.kernels.repeated import Repeated

MAX_SPLIT_TOKENS = 16  # query tokens per request up to which programs share a query tile's splits
PROGRAMS = 1056  # enough to fill a GPU: 8 on each of 132 multiprocessors
# this many warps fill a GPU without sharing; measured on an H200 over 16 to 128 requests, 1 to 6
# rows, 300 and 2,048 keys
MANY_WARPS = 1024


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
    max_seq_len:     host-side bound on positions + 1
    paths:           None where each row's keys are all in its request's blocks
    """

    block_table: Tensor  # [R + 1, M] blocks by state row; the last row is scratch
    idx_mapping: Tensor  # [B] state row per batch slot, -1 = padding
    positions: Tensor  # [T] 0 = padding
    query_start_loc: Tensor | None = None  # [B + 1] first row of each batch slot
    max_query_len: int = 1
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
    """Elements for a round's weighted values, peak and total of each row, head and split."""
    return num_rows * num_heads * num_splits(max_seq_len) * (head_dim + 2)


class QueryTile(NamedTuple):
    """The query rows of a program, and its warps.

    more_than:   for passes whose longest batch slot has more query rows, tokens x heads of a group
    skips_masks: tiles of keys that all rows see are not masked
    """

    more_than: int
    rows: int
    num_warps: int
    skips_masks: bool = False


# The only place that chooses tiles. Larger ones, for prompts, are compiled and compared by tests
# and scripts/tune_attention.py, but not chosen yet.
QUERY_TILES = (QueryTile(0, 16, 2), QueryTile(16, 32, 4))
PROMPT_TILES = tuple(
    QueryTile(1024, rows, num_warps, skips_masks)
    for rows, num_warps in ((64, 4), (64, 8), (128, 8))
    for skips_masks in (False, True)
)
# Batch slots with more query rows are prompt_attention.py's, where that can run. None: none are.
PROMPT_MORE_THAN: int | None = None


def query_tile(query_rows: int) -> QueryTile:
    """The last of QUERY_TILES that is meant for this many query rows of a batch slot."""
    return [tile for tile in QUERY_TILES if tile.more_than < query_rows][-1]


class Launch(NamedTuple):
    """How the query rows of a pass are cut: `num_splits` is 1 where one program walks them all."""

    tile: QueryTile
    tokens: int  # of a query tile; its rows are tokens x heads of a group, at powers of 2
    tiles: int  # of a batch slot
    query_tiles: int  # of all batch slots
    is_split: bool
    num_splits: int


def plan_launch(rows: QueryRows, group: int, G: int) -> Launch:
    """group: query heads of each of the G kv heads."""
    tile = query_tile(rows.max_query_len * group)
    tokens = max(tile.rows // next_power_of_2(group), 1)
    tiles = -(-rows.max_query_len // tokens)
    query_tiles = len(rows.idx_mapping) * tiles
    is_short = rows.max_query_len <= MAX_SPLIT_TOKENS or rows.paths is not None
    is_split = is_short and query_tiles * G * tile.num_warps < MANY_WARPS
    splits = num_splits(rows.max_seq_len) if is_split else 1
    return Launch(tile, tokens, tiles, query_tiles, is_split, splits)


def launch_paged_attention(q_THC: Tensor, out_THC: Tensor, cache: Tensor, rows: QueryRows) -> None:
    if not rows.launches:
        rows.launches.extend(_launches(q_THC, cache, rows))
    tensors = out_THC, q_THC, *cache.unbind()
    attend, *finish = rows.launches
    attend(*tensors)
    for each in finish:
        each(*tensors if rows.paths is not None else (out_THC,))


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
        return [*_prepare(q_THC, cache, rows)]
    table = rows.block_table, rows.idx_mapping, rows.positions, rows.query_start_loc
    return [PromptAttention(q_THC, cache, *table, rows.max_query_len)]


def _prepare(q_THC: Tensor, cache: Tensor, rows: QueryRows) -> list[Repeated]:
    """The kernels of each layer of a pass."""
    _, H, C = q_THC.shape
    _, _, G, S, _ = cache.shape
    T = rows.num_rows
    plan = plan_launch(rows, H // G, G)
    paths = rows.paths
    # one program for all splits leaves two partial results to a kernel that goes on
    NS = plan.num_splits if plan.is_split or paths is None else 2
    # weighted values of the splits, then their peaks and totals
    size = T * H * NS * (C + 2) if plan.is_split or paths is not None else 1
    acc = rows.workspace
    if acc is None or acc.numel() < size:
        acc = torch.empty(size, dtype=torch.float32, device=q_THC.device)
    stats = acc[T * H * NS * C :]
    is_uniform = rows.query_start_loc is None
    starts = rows.positions if rows.query_start_loc is None else rows.query_start_loc
    # a request's rows and blocks
    table = acc, stats, rows.block_table, rows.idx_mapping, rows.positions, starts
    R, M = rows.block_table.shape
    # times log2(e): the kernels take powers of 2
    numbers = rows.max_query_len, R - 1, M, NS, C**-0.5 * 1.4426950408889634
    # Round where the source rounds. A tile without a mask would otherwise have its scale fused with
    # the subtraction of the peak, and other bits than the same tile with one.
    options = {**launch_options(q_THC), "enable_fp_fusion": False}
    constants = {"H": H, "G": G, "S": S, "C": C, "PDL": options["PDL"]}
    cut = {**constants, "IS_SPLIT": plan.is_split, "IS_UNIFORM": is_uniform}
    heads = next_power_of_2(H // G)
    attention = Repeated(
        _paged_attention_kernel,
        (plan.query_tiles, G, min(plan.num_splits, -(-PROGRAMS // (plan.query_tiles * G)))),
        then=(*table, rows.positions if paths is None else paths.starts, plan.tiles, *numbers),
        constants={
            **cut,
            "GROUP": heads,
            "TOKENS": plan.tokens,
            "HAS_PATHS": paths is not None,
            "SKIP": plan.tile.skips_masks,
        },
        options={"num_warps": plan.tile.num_warps, "num_stages": 2, **options},
    )
    if paths is not None:
        tails = Repeated(
            _path_tails_kernel,
            (len(rows.idx_mapping) * rows.max_query_len, G, 1),
            then=(*table, paths.slots, paths.starts, paths.slots.shape[1], *numbers),
            constants={**cut, "ROWS": max(heads, MIN_ROWS)},
            options={"num_warps": 4, "num_stages": 2, **options},
        )
        return [attention, tails]
    if not plan.is_split:
        return [attention]
    combine = Repeated(
        _combine_kernel,
        (T, H, 1),
        then=(acc, stats, rows.positions, NS),
        constants={"H": H, "C": C, "PDL": options["PDL"]},
        options={"num_warps": 1, **options},
    )
    return [attention, combine]


@jit(
    varying=(
        "idx_ptr",
        "positions_ptr",
        "starts_ptr",
        "path_starts_ptr",
        "tiles",
        "query_len",
        "NS",
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
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    SKIP: tl.constexpr,
):
    begin(PDL)
    b, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    g = tl.program_id(1)
    split = tl.program_id(2) if IS_SPLIT else 0
    sharers = tl.num_programs(2) if IS_SPLIT else 1
    if IS_UNIFORM:
        first_row = b * query_len + tile * TOKENS
        end = (b + 1) * query_len
    else:
        first_row = tl.load(starts_ptr + b) + tile * TOKENS
        end = tl.load(starts_ptr + b + 1)
    if first_row >= end:
        return
    i = tl.arange(0, TOKENS * GROUP)
    t = first_row + i // GROUP
    head = g * (H // G) + i % GROUP
    inside = (t < end) & (i % GROUP < H // G)
    position = tl.load(positions_ptr + t, mask=inside, other=-1)
    last = tl.max(position, axis=0)
    first = tl.min(tl.where(inside, position, last), axis=0)
    if HAS_PATHS:  # only whole tiles of shared keys
        path_tile = tl.load(path_starts_ptr + b) // S * S
        last = tl.minimum(last, path_tile - 1)
    if IS_SPLIT and split_start(split) > last:
        return
    c = tl.arange(0, C)
    q_at = (t * H + head)[:, None] * C + c[None, :]
    q = tl.load(q_ptr + q_at, mask=inside[:, None], other=0.0)
    row = tl.load(idx_ptr + b)
    keys = (k_ptr, v_ptr, block_table_ptr + tl.where(row < 0, R, row) * M)
    peak, total, acc = no_keys(TOKENS * GROUP, C)
    parts = acc_ptr, stats_ptr, (t * H + head).to(tl.int64) * NS, inside
    end_of_walk = last + 1
    if HAS_PATHS and not IS_SPLIT:  # path_tails.py goes on in the split of path_tile
        end_of_walk = tl.minimum(end_of_walk, split_start(split_of(path_tile)))
    while split_start(split) < end_of_walk:
        part_peak, part_total, part_acc = attend_split(
            q, keys, position, first, last, split, scale, g, G, S, SKIP
        )
        if IS_SPLIT:
            store_part(parts, split, part_peak, part_total, part_acc, C)
        else:
            peak, total, acc = add_part(peak, total, acc, part_peak, part_total, part_acc)
        split += sharers
    if HAS_PATHS and not IS_SPLIT:
        store_part(parts, 0, peak, total, acc, C)
        peak, total, acc = attend_split(q, keys, position, first, last, split, scale, g, G, S, SKIP)
        store_part(parts, 1, peak, total, acc, C)
    elif not IS_SPLIT:
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + q_at, out, mask=inside[:, None])


@jit(varying=("positions_ptr", "NS"))
def _combine_kernel(
    out_ptr,  # [T, H, C]
    acc_ptr,  # [T, H, NS, C] float32
    stats_ptr,  # [T, H, NS, 2] float32
    positions_ptr,  # [T]
    NS,
    H: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    c = tl.arange(0, C)
    position = tl.load(positions_ptr + t)
    at = (t * H + head) * NS
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((C,), tl.float32)
    split = 0
    while split_start(split) <= position:
        part_peak = tl.load(stats_ptr + (at + split) * 2)
        part_total = tl.load(stats_ptr + (at + split) * 2 + 1)
        decay, weight, peak = weigh(peak, part_peak)
        total = tl.fma(total, decay, part_total * weight)
        part_acc = tl.load(acc_ptr + (at + split) * C + c)
        acc = tl.fma(acc, tl.broadcast_to(decay, acc.shape), part_acc * weight)
        split += 1
    tl.store(out_ptr + (t * H + head) * C + c, (acc / total).to(out_ptr.dtype.element_ty))


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
