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
same functions for a split and for adding one, on tiles of 16 or 32 query rows: too few for wgmma,
whose order of summation differs. Maxima are exact and totals come from the tensor cores like the
values, so nothing depends on how a tile lies across threads: a row gets the same bits both ways.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, pick, tl
from specdec.kernels.attention_splits import (
    add_part,
    attend_split,
    no_keys,
    num_splits,
    split_start,
    weigh,
)
from specdec.kernels.invariant import ROWS, blocked_exp, tree_sum
from specdec.kernels.overlap import begin
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
    """

    block_table: Tensor  # [R + 1, M] blocks by state row; the last row is scratch
    idx_mapping: Tensor  # [B] state row per batch slot, -1 = padding
    positions: Tensor  # [T] 0 = padding
    query_start_loc: Tensor | None = None  # [B + 1] first row of each batch slot
    max_query_len: int = 1
    max_seq_len: int
    tiles: TilePlan | None = None  # the twin's query tiles
    workspace: Tensor | None = None  # float32, for partial results: see workspace_size
    # the kernels of each layer, once the first has been launched
    launches: list[Repeated] = field(default_factory=list, init=False, compare=False, repr=False)

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


class Launch(NamedTuple):
    """How the query rows of a pass are cut: `num_splits` is 1 where one program walks them all."""

    tokens: int  # of a query tile; its rows are tokens x heads of a group, at powers of 2
    tiles: int  # of a batch slot
    query_tiles: int  # of all batch slots
    num_warps: int
    is_split: bool
    num_splits: int


def plan_launch(rows: QueryRows, group: int, G: int) -> Launch:
    """group: query heads of each of the G kv heads."""
    is_wide = rows.max_query_len * group > 16
    tokens = max((32 if is_wide else 16) // next_power_of_2(group), 1)
    tiles = -(-rows.max_query_len // tokens)
    query_tiles = len(rows.idx_mapping) * tiles
    num_warps = 4 if is_wide else 2
    is_split = rows.max_query_len <= MAX_SPLIT_TOKENS and query_tiles * G * num_warps < MANY_WARPS
    splits = num_splits(rows.max_seq_len) if is_split else 1
    return Launch(tokens, tiles, query_tiles, num_warps, is_split, splits)


def launch_paged_attention(q_THC: Tensor, out_THC: Tensor, cache: Tensor, rows: QueryRows) -> None:
    if not rows.launches:
        rows.launches.extend(_prepare(q_THC, cache, rows))
    attend, *combine = rows.launches
    attend(out_THC, q_THC, *cache.unbind())
    for each in combine:
        each(out_THC)


def _prepare(q_THC: Tensor, cache: Tensor, rows: QueryRows) -> list[Repeated]:
    """The kernels of each layer of a pass."""
    _, H, C = q_THC.shape
    _, _, G, S, _ = cache.shape
    T = rows.num_rows
    plan = plan_launch(rows, H // G, G)
    NS = plan.num_splits
    # weighted values of the splits, then their peaks and totals
    size = T * H * NS * (C + 2) if plan.is_split else 1
    acc = rows.workspace
    if acc is None or acc.numel() < size:
        acc = torch.empty(size, dtype=torch.float32, device=q_THC.device)
    stats = acc[T * H * NS * C :]
    sharers = min(NS, -(-PROGRAMS // (plan.query_tiles * G)))
    options = launch_options(q_THC)
    attention = Repeated(
        _paged_attention_kernel,
        (plan.query_tiles, G, sharers),
        then=(
            acc,
            stats,
            rows.block_table,
            rows.idx_mapping,
            rows.positions,
            rows.positions if rows.query_start_loc is None else rows.query_start_loc,
            plan.tiles,
            rows.max_query_len,
            rows.block_table.shape[0] - 1,
            rows.block_table.shape[1],
            NS,
            C**-0.5 * 1.4426950408889634,  # times log2(e): the kernel takes powers of 2
        ),
        constants={
            "H": H,
            "G": G,
            "S": S,
            "C": C,
            "GROUP": next_power_of_2(H // G),
            "TOKENS": plan.tokens,
            "IS_SPLIT": plan.is_split,
            "IS_UNIFORM": rows.query_start_loc is None,
            "PDL": options["PDL"],
        },
        options={"num_warps": plan.num_warps, "num_stages": 2, **options},
    )
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


@jit(varying=("idx_ptr", "positions_ptr", "starts_ptr", "tiles", "query_len", "NS"))
def _paged_attention_kernel(
    out_ptr,  # [T, H, C]
    q_ptr,  # [T, H, C]
    k_ptr,  # [N + 1, G, S, C]
    v_ptr,  # [N + 1, G, S, C]
    acc_ptr,  # [T, H, NS, C] float32, with IS_SPLIT
    stats_ptr,  # [T, H, NS, 2] float32, with IS_SPLIT: peak, total
    block_table_ptr,  # [R + 1, M]
    idx_ptr,  # [B]
    positions_ptr,  # [T]
    starts_ptr,  # [B + 1], without IS_UNIFORM
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
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    g = tl.program_id(1)
    split = tl.program_id(2) if IS_SPLIT else 0
    sharers = tl.num_programs(2) if IS_SPLIT else 1
    if IS_UNIFORM:
        first = b * query_len + tile * TOKENS
        end = (b + 1) * query_len
    else:
        first = tl.load(starts_ptr + b) + tile * TOKENS
        end = tl.load(starts_ptr + b + 1)
    if first >= end:
        return
    i = tl.arange(0, TOKENS * GROUP)
    t = first + i // GROUP
    head = g * (H // G) + i % GROUP
    inside = (t < end) & (i % GROUP < H // G)
    position = tl.load(positions_ptr + t, mask=inside, other=-1)
    last = tl.max(position, axis=0)
    if IS_SPLIT and split_start(split) > last:
        return
    c = tl.arange(0, C)
    q_at = (t * H + head)[:, None] * C + c[None, :]
    q = tl.load(q_ptr + q_at, mask=inside[:, None], other=0.0)
    row = tl.load(idx_ptr + b)
    keys = (k_ptr, v_ptr, block_table_ptr + tl.where(row < 0, R, row) * M)
    peak, total, acc = no_keys(TOKENS * GROUP, C)
    while split_start(split) <= last:
        part_peak, part_total, part_acc = attend_split(
            q, keys, position, last, split, scale, g, G, S
        )
        if IS_SPLIT:
            at = (t * H + head).to(tl.int64) * NS + split
            tl.store(stats_ptr + at * 2, part_peak, mask=inside)
            tl.store(stats_ptr + at * 2 + 1, part_total, mask=inside)
            tl.store(acc_ptr + at[:, None] * C + c[None, :], part_acc, mask=inside[:, None])
        else:
            peak, total, acc = add_part(peak, total, acc, part_peak, part_total, part_acc)
        split += sharers
    if not IS_SPLIT:
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


def paged_attention_ref(q_THC: Tensor, out_THC: Tensor, cache: Tensor, rows: QueryRows) -> None:
    """In tiles of 8 query rows of one request, by rows.tiles; rows in no tile become 0."""
    tiles = rows.tiles
    assert tiles is not None, "the twin needs a tile plan"
    q_THC, out_THC = q_THC[: rows.num_rows], out_THC[: rows.num_rows]
    _, _, G, S, C = cache.shape
    H = q_THC.shape[1]
    NT = len(tiles.reqs)
    q = F.pad(q_THC.float() * C**-0.5, (0, 0, 0, 0, 0, 1))[tiles.rows].view(NT, ROWS, G, H // G, C)
    q = q.permute(0, 2, 3, 1, 4).reshape(NT * G, H // G * ROWS, C)
    position = F.pad(rows.positions, (0, 1))[tiles.rows].view(NT, 1, 1, ROWS, 1)
    last = position.amax(dim=3, keepdim=True)
    peak = q.new_full((NT, G, H // G, ROWS, 1), -torch.inf)
    total = torch.zeros_like(peak)
    acc = q.new_zeros(NT, G, H // G, ROWS, C)
    block_table_NM = rows.block_table[rows.idx_mapping[tiles.reqs]]
    for tile in range(-(-rows.max_seq_len // S)):
        key = torch.arange(tile * S, (tile + 1) * S, device=q.device)
        k, v = cache[:, block_table_NM[:, tile]].float().unbind(0)  # [NT, G, S, C] each
        scores = torch.bmm(q, k.view(NT * G, S, C).transpose(1, 2)).view(NT, G, H // G, ROWS, S)
        scores = torch.where(key <= position, scores, -torch.inf)
        previous = peak
        peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = blocked_exp(scores - peak)
        decay = blocked_exp(previous - peak)
        v = torch.where((key <= last).view(NT, 1, S, 1), v, 0.0)
        product = torch.bmm(weights.view(NT * G, H // G * ROWS, S), v.view(NT * G, S, C))
        total = total * decay + tree_sum(weights)
        acc = acc * decay + product.view(acc.shape)
    finished = (acc / total).permute(0, 3, 1, 2, 4).reshape(NT * ROWS, H, C).to(out_THC.dtype)
    padded = out_THC.new_zeros(tiles.num_rows + 1, H, C)
    padded[tiles.rows] = finished
    out_THC.copy_(padded[:-1])
