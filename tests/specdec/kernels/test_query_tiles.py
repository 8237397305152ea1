"""A row's bits are the same whatever the query tile: its rows, its warps, masks or none."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor

from specdec.kernels import paged_attention as attention
from specdec.kernels.compilations import compiling_ahead
from specdec.kernels.paged_attention import (
    PROMPT_TILES,
    QUERY_TILES,
    QueryRows,
    QueryTile,
    launch_paged_attention,
    query_tile,
)

S = 64
SMALL = QueryTile(0, 16, 2)
TILES = [
    QueryTile(0, rows, num_warps, skips_masks)
    for rows, num_warps in (
        (16, 2),
        (16, 4),
        (32, 2),
        (32, 4),
        (64, 4),
        (64, 8),
        (128, 4),
        (128, 8),
    )
    for skips_masks in (False, True)
]
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# lengths of the requests and how many of their last rows ask: a chunk, and rounds at all borders
CHUNK = (1100, 64, 2210, 8260), (1100, 64, 129, 70)
ROUND = (1, 63, 64, 65, 130, 1023, 1024, 1025, 1600, 8191, 8192, 8193, 10300), (1,) * 13
VERIFY = (8, 63, 64, 65, 70, 1023, 1026, 1030, 8191, 8194, 8198), (6,) * 11
KINDS = ("normal", "large", "small", "positive", "cancelling", "subnormal")
EXTENTS = {"chunk": CHUNK, "round": ROUND, "verify": VERIFY}
GPU_CASES = [
    *((BF16, 128, group) for group in (1, 2, 4, 5, 7, 8)),
    *((BF16, 64, group) for group in (1, 4, 7)),
    *((FP16, 128, group) for group in (4, 5)),
    (FP16, 64, 8),
    (BF16, 256, 1),
    (BF16, 256, 4),
    (FP32, 64, 4),
    (FP32, 128, 1),
]


def values(kind: str, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Of q, k or v."""
    x = torch.randn(*shape, device=device)
    tiny = 2e-7 if dtype == FP16 else 1e-39  # subnormal in the cache's type
    scales = {"large": 30.0, "small": 1e-3, "subnormal": tiny}
    if kind == "positive":
        x = x.abs()
    if kind == "cancelling":
        x = x + 100.0 * torch.randint(0, 2, shape, device=device).mul(2).sub(1)
    return (x * scales.get(kind, 1.0)).to(dtype)


def case(kind, extents, *, group, G, C, dtype, device) -> tuple[Tensor, Tensor, QueryRows]:
    """Requests of these lengths, asked by their last rows; unwritten slots are NaN."""
    lengths, query_lens = extents
    M = -(-max(lengths) // S)
    num_blocks = len(lengths) * M
    how = {"dtype": dtype, "device": device}
    cache = torch.full((2, num_blocks + 1, G, S, C), torch.nan, **how)
    table = torch.randperm(num_blocks, device=device).view(-1, M)
    for row, length in zip(table, lengths, strict=True):
        kv = values(kind, 2, M * S, G, C, **how).unflatten(1, (M, S)).transpose(2, 3)
        cache[:, row] = kv
        cache[:, row[-(-length // S) :]] = torch.nan
        cache[:, row[(length - 1) // S], :, (length - 1) % S + 1 :] = torch.nan
    ends = zip(lengths, query_lens, strict=True)
    positions = [position for end, count in ends for position in range(end - count, end)]
    starts = [sum(query_lens[:b]) for b in range(len(lengths) + 1)]
    rows = QueryRows(
        block_table=torch.cat([table, torch.full((1, M), num_blocks, device=device)]),
        idx_mapping=torch.arange(len(lengths), device=device),
        positions=torch.tensor(positions, device=device),
        query_start_loc=None if len({*query_lens}) == 1 else torch.tensor(starts, device=device),
        max_query_len=max(query_lens),
        max_seq_len=max(lengths),
    )
    return values(kind, len(positions), G * group, C, **how), cache, rows


def attend(monkeypatch, tile: QueryTile, q: Tensor, cache: Tensor, rows: QueryRows) -> Tensor:
    monkeypatch.setattr(attention, "QUERY_TILES", (tile,))
    monkeypatch.setattr(attention, "PROMPT_MORE_THAN", None)
    rows.launches.clear()
    out = torch.full_like(q, torch.nan)
    launch_paged_attention(q, out, cache, rows)
    return out


@pytest.mark.parametrize("group, dtype", [(1, FP32), (4, FP16)])
def test_a_chunk_has_the_same_bits_in_tiles_of_any_size(exact_device, monkeypatch, group, dtype):
    extents = (140, 70), (90, 7)
    q, cache, rows = case(
        "normal", extents, group=group, G=1, C=16, dtype=dtype, device=exact_device
    )
    expected = attend(monkeypatch, SMALL, q, cache, rows)
    assert not expected.isnan().any()
    for rows_of_tile, skips_masks in product((32, 64, 128), (False, True)):
        tile = QueryTile(0, rows_of_tile, 4, skips_masks)
        assert torch.equal(attend(monkeypatch, tile, q, cache, rows), expected), tile


def test_splits_have_the_same_bits_in_tiles_of_any_size(exact_device, monkeypatch):
    extents = (64, 130, 200), (4, 4, 4)
    q, cache, rows = case("normal", extents, group=2, G=1, C=16, dtype=FP16, device=exact_device)
    expected = attend(monkeypatch, SMALL, q, cache, rows)
    for tile in (QueryTile(0, 16, 2, True), QueryTile(0, 64, 4, True)):
        assert torch.equal(attend(monkeypatch, tile, q, cache, rows), expected), tile


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, C, group", GPU_CASES)
def test_a_gpu_gives_the_same_bits_in_tiles_of_any_size(monkeypatch, dtype, C, group):
    """Prints and fails with every tile that differs: where, in how many rows, and by how much."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    sizes = {"group": group, "G": 2, "C": C, "dtype": dtype, "device": "cuda"}
    # in float32 products run without tensor cores, and take long to compile
    tiles = [tile for tile in TILES if dtype != FP32 or tile.rows <= 64]
    different, too_large = [], set()
    for is_rehearsal in (True, False):
        with compiling_ahead(device, False, may_fail=True) if is_rehearsal else nullcontext():
            kinds = ("normal",) if is_rehearsal else KINDS
            for kind, (name, extents) in product(kinds, EXTENTS.items()):
                q, cache, rows = case(kind, extents, **sizes)
                expected = None
                for tile in tiles:
                    try:
                        found = attend(monkeypatch, tile, q, cache, rows)
                    except Exception as error:
                        if "out of resource" not in str(error):
                            raise
                        too_large.add(tile)
                        continue
                    expected = found if expected is None else expected
                    if not is_rehearsal and not torch.equal(found, expected):
                        different.append((kind, name, tile, difference(found, expected)))
                assert is_rehearsal or expected.isfinite().all(), (kind, name)
    print(f"{dtype} C={C} group={group}: {len(tiles)} tiles, too large: {sorted(too_large)}")
    assert SMALL not in too_large
    assert not different, "\n".join(map(str, different))


def difference(found: Tensor, expected: Tensor) -> str:
    rows = (found != expected).flatten(1).any(1)
    most = (found.float() - expected.float()).abs().max().item()
    return f"{int(rows.sum())} of {len(rows)} rows, at most {most:.3g}"


def test_tiles_are_those_of_old_and_a_prompt_tile_can_be_added(monkeypatch):
    assert [query_tile(rows)[1:3] for rows in (1, 16, 17, 100_000)] == [
        (16, 2),
        (16, 2),
        (32, 4),
        (32, 4),
    ]
    monkeypatch.setattr(attention, "QUERY_TILES", (*QUERY_TILES, PROMPT_TILES[-1]))
    assert [query_tile(rows).rows for rows in (16, 1024, 1025)] == [16, 32, 128]
