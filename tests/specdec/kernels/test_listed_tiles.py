"""A graph that serves any short step finds its query tiles in a list; their bits are as without."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from specdec.kernels import next_power_of_2
from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.attention.launch_plan import QUERY_TILES, HeadShape, plan_listed
from specdec.kernels.attention.query_rows import LISTED_ROWS
from specdec.kernels.attention.twin import paged_attention_ref
from specdec.rounds.short import listed_tiles
from specdec.scheduling.work import PromptPart, Round
from specdec.sizes import PLAIN, chain
from tests.specdec.kernels.attention_cases import BF16, FP16, FP32, case, output

# three slots that verify up to ten rows, and parts of prompts
LENGTHS, QUERY_LENS, NUM_VERIFIED = (130, 64, 700, 37, 200, 9), (10, 3, 8, 37, 16, 1), 3
PART = {"state_row": 0, "blocks": [], "prompt": []}
NUM_TILES = 20
CASES = [(1, FP32, 16), (3, FP16, 96), (8, FP32, 16)]
MORE = [(4, FP16, 16), (8, FP16, 64), (16, FP16, 16), (71, FP16, 32)]
GPU_CASES = [*((group, BF16, 128) for group in (1, 4, 5, 8, 16)), (8, FP16, 64), (2, FP32, 64)]
GPU_CASES += [(8, BF16, 256), (64, BF16, 64)]


def listed(rows, shape, shared_rows):
    """The same rows, some slots of which verify, with a list of their tiles."""
    ends = list(zip(LENGTHS, QUERY_LENS, strict=True))[NUM_VERIFIED:]
    parts = [PromptPart(**PART, start=end - n, length=n) for end, n in ends]
    sizes = {"state_rows": range(NUM_VERIFIED), "shape": shape, "shared_rows": shared_rows}
    tiles_X3 = listed_tiles(Round(**sizes, parts=parts, next_shape=PLAIN), NUM_TILES)
    tiles_X3 = torch.from_numpy(tiles_X3).to(rows.positions.device)
    return replace(rows, listed=tiles_X3, max_query_len=1)


def check(group, dtype, C, device, how=launch_paged_attention, window=None):
    torch.manual_seed(0)
    extents = LENGTHS, QUERY_LENS
    q, cache, rows = case("normal", extents, group=group, G=2, C=C, dtype=dtype, device=device)
    sinks_H = None if window is None else torch.randn(2 * group, device=device)
    how = partial(how, window=window, sinks_H=sinks_H)
    expected = output(how, q, cache, rows)
    assert not expected.isnan().any()
    shared_rows = sum(QUERY_LENS[:NUM_VERIFIED])
    assert torch.equal(output(how, q, cache, listed(rows, chain(9), shared_rows)), expected)


@pytest.mark.parametrize("window", [1, 65])
def test_listed_tiles_have_windows_and_sinks(window):
    check(2, FP32, 16, "cpu", window=window)


@pytest.mark.gpu
def test_listed_tiles_have_windows_and_sinks_on_a_gpu():
    for window in (1, 65, 128):
        check(8, BF16, 64, "cuda", window=window)


@pytest.mark.parametrize(
    "group, dtype, C", [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]
)
def test_listed_tiles_have_the_bits_of_others(group, dtype, C):
    check(group, dtype, C, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("group, dtype, C", GPU_CASES)
def test_listed_tiles_have_the_bits_of_others_on_a_gpu(group, dtype, C):
    check(group, dtype, C, "cuda")


@pytest.mark.parametrize("group", [1, 2, 3, 8, 12, 16, 48, 71])
def test_no_program_has_more_rows_than_a_tile(group):
    for C, itemsize in ((64, 2), (256, 2), (128, 4)):
        plan = plan_listed(HeadShape(group, 1, C, itemsize))
        assert plan.tile in QUERY_TILES
        assert plan.tiles * plan.tokens == LISTED_ROWS
        assert plan.tokens == 1 or plan.tokens * next_power_of_2(group) <= plan.tile.rows


def test_the_twin_takes_listed_tiles():
    check(3, FP32, 16, "cpu", paged_attention_ref)


def test_slots_with_equally_many_rows_need_no_starts(monkeypatch):
    """Of these the host knows all rows; their starts on the device may be anything."""
    monkeypatch.setattr(f"{__name__}.QUERY_LENS", (10, 10, 10, 37, 16, 1))
    torch.manual_seed(0)
    q, cache, rows = case(
        "normal", (LENGTHS, QUERY_LENS), group=2, G=1, C=16, dtype=FP32, device="cpu"
    )
    expected = output(launch_paged_attention, q, cache, rows)
    stale = replace(listed(rows, chain(9), 0), query_start_loc=torch.full((7,), 5))
    assert torch.equal(output(launch_paged_attention, q, cache, stale), expected)
