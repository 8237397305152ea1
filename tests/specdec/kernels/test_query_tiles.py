"""A row's bits are the same whatever the query tile: its rows, its warps, masks or none."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from specdec.kernels.attention import launch_plan
from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.attention.launch_plan import (
    QUERY_TILES,
    HeadShape,
    Launch,
    QueryTile,
    plan_launch,
    query_tile,
)
from specdec.kernels.attention.query_rows import QueryRows
from specdec.kernels.compilations import compiling_ahead
from tests.specdec.kernels.attention_cases import BF16, FP16, FP32, case, output

SMALL = QueryTile(0, 16, 2)
PROMPT_TILES = tuple(
    QueryTile(1024, rows, num_warps, skips_masks)
    for rows, num_warps in ((64, 4), (64, 8), (128, 8))
    for skips_masks in (False, True)
)
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
# lengths of the requests and how many of their last rows ask: a chunk, and rounds at all borders
CHUNK = (1100, 64, 2210, 8260), (1100, 64, 129, 70)
ROUND = (1, 63, 64, 65, 130, 1023, 1024, 1025, 1153, 4095, 4096, 4353, 8192, 8193, 10300), (1,) * 15
VERIFY = (8, 63, 64, 65, 70, 1023, 1026, 1030, 8191, 8194, 8198), (6,) * 11
KINDS = ("normal", "large", "small", "positive", "cancelling", "subnormal")
EXTENTS = {"chunk": CHUNK, "round": ROUND, "verify": VERIFY}
GPU_CASES = [
    *((BF16, 128, group) for group in (1, 2, 4, 5, 7, 8)),
    *((BF16, 64, group) for group in (1, 4, 7)),
    *((FP16, 128, group) for group in (4, 5)),
    (FP16, 64, 8),
    *((BF16, 96, group) for group in (1, 5)),
    (FP16, 96, 8),
    (BF16, 80, 4),
    (BF16, 256, 1),
    (BF16, 256, 4),
    (FP32, 64, 4),
    (FP32, 96, 2),
    (FP32, 128, 1),
]


def attend(monkeypatch, tile: QueryTile, q: Tensor, cache: Tensor, rows: QueryRows) -> Tensor:
    monkeypatch.setattr(launch_plan, "QUERY_TILES", (tile,))
    monkeypatch.setattr(launch_plan, "PROMPT_MORE_THAN", None)
    rows.launches.clear()
    return output(launch_paged_attention, q, cache, rows)


@pytest.mark.parametrize(
    "group, dtype, C",
    [
        (1, FP32, 16),
        (3, FP16, 96),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(4, FP16, 16), (2, FP32, 96)]),
    ],
)
def test_a_chunk_has_the_same_bits_in_tiles_of_any_size(exact_device, monkeypatch, group, dtype, C):
    extents = (140, 70), (90, 7)
    q, cache, rows = case(
        "normal", extents, group=group, G=1, C=C, dtype=dtype, device=exact_device
    )
    expected = attend(monkeypatch, SMALL, q, cache, rows)
    assert not expected.isnan().any()
    for rows_of_tile, skips_masks in product((32, 64, 128), (False, True)):
        tile = QueryTile(0, rows_of_tile, 4, skips_masks)
        assert torch.equal(attend(monkeypatch, tile, q, cache, rows), expected), tile


@pytest.mark.parametrize("C", [16, pytest.param(96, marks=pytest.mark.slow)])
def test_splits_have_the_same_bits_in_tiles_of_any_size(exact_device, monkeypatch, C):
    extents = (64, 130, 200), (4, 4, 4)
    q, cache, rows = case("normal", extents, group=2, G=1, C=C, dtype=FP16, device=exact_device)
    expected = attend(monkeypatch, SMALL, q, cache, rows)
    for tile in (QueryTile(0, 16, 2, True), QueryTile(0, 64, 4, True)):
        assert torch.equal(attend(monkeypatch, tile, q, cache, rows), expected), tile


def test_rows_of_padding_behind_a_slots_own_hide_no_keys(exact_device):
    """A slot has them where a request drafted less than others; they have position 0."""
    extents = (330,), (4,)
    q, cache, rows = case("normal", extents, group=2, G=1, C=16, dtype=FP16, device=exact_device)
    assert plan_launch(1, 4, HeadShape(2, 1, 16, 2)).looks_first
    expected = output(launch_paged_attention, q, cache, rows)
    padding = torch.tensor([2, 3], device=exact_device)
    padded = replace(rows, positions=rows.positions.index_fill(0, padding, 0))
    found = output(launch_paged_attention, q, cache, padded)
    others = torch.ones(len(q), dtype=torch.bool, device=exact_device).index_fill(0, padding, False)
    assert torch.equal(found[others], expected[others])
    assert not expected.isnan().any()


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


def test_a_prompt_takes_tiles_of_64_rows_where_they_fit(monkeypatch):
    heads = HeadShape(4, 8, 128, 2)

    def rows_of_tiles(heads: HeadShape) -> list[int]:
        return [query_tile(rows, heads).rows for rows in (1, 16, 17, 32, 33, 100_000)]

    assert rows_of_tiles(heads) == [16, 16, 32, 32, 64, 64]
    assert rows_of_tiles(heads._replace(C=256)) == [16, 16, 32, 32, 32, 32]
    assert rows_of_tiles(heads._replace(itemsize=4)) == [16, 16, 32, 32, 32, 32]
    monkeypatch.setattr(launch_plan, "QUERY_TILES", (*QUERY_TILES, PROMPT_TILES[-1]))
    assert [query_tile(rows, heads).rows for rows in (16, 1024, 1025)] == [16, 64, 128]


def test_programs_decide_who_shares_splits(monkeypatch):
    def plans() -> list[Launch]:
        return [plan_launch(B, 4, HeadShape(4, 8, 128, 2)) for B in (1, 15, 16, 31, 64)]

    assert [plan.is_split for plan in plans()] == [True, True, False, False, False]
    assert [plan.is_helped for plan in plans()] == [False, False, True, True, True]
    assert not plan_launch(64, 17, HeadShape(4, 8, 128, 2)).is_helped  # prompts
    assert not plan_launch(1, 16, HeadShape(16, 32, 128, 2)).is_helped  # each slot fills the GPU
    assert not plan_launch(64, 4, HeadShape(4, 8, 128, 2), most_keys=4096).is_helped
    monkeypatch.setattr(launch_plan, "ALONE_KEYS", None)
    assert not any(plan.is_helped for plan in plans())


@pytest.mark.parametrize(
    "slots, most, usual, rows",
    [
        (1, 9, 9, 16),  # one request's rows make several small tiles
        (1, 6, None, 16),
        (8, 9, 4, 32),  # slots with more rows than usual have them in one tile
        (8, 4, None, 16),
        (64, 9, 3, 16),  # programs that walk all splits: as many as rows need
        (64, 9, 9, 64),
    ],
)
def test_tiles_are_made_for_the_rows_that_most_slots_have(slots, most, usual, rows):
    plan = plan_launch(slots, most, HeadShape(4, 8, 128, 2), usual_query_len=usual)
    assert plan.tile.rows == rows
    assert plan.tiles * plan.tokens >= most
