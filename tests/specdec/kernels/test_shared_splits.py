"""Teams share the splits of several slots, more of them where there are more keys."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.kernels import tl, triton
from specdec.kernels.attention import launch_plan
from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.attention.launch_plan import HeadShape, Teams, plan_launch
from specdec.kernels.attention.query_rows import QueryRows
from specdec.kernels.attention.shared_splits import _teams_of
from tests.specdec.kernels.attention_cases import BF16, FP16, FP32, case, launches_of, output

ONE_WALKS_ALL, TEAMS = 1, 1 << 30  # programs that fill the GPU
ONE_ROW = (1, 64, 65, 700, 128, 1100), (1,) * 6
RAGGED = (130, 64, 330, 1090, 66), (2, 4, 0, 6, 1)
BORDERS = (1025, 4096, 8193, 1023, 32768, 300, 4097, 9000, 8192, 10, 1153)


@triton.jit
def _teams_kernel(out_ptr, num_keys_ptr, teams, SLOTS: tl.constexpr):
    b = tl.arange(0, SLOTS)
    first, count = _teams_of(tl.load(num_keys_ptr + b), teams)
    tl.store(out_ptr + b, first)
    tl.store(out_ptr + SLOTS + b, count)


def teams_of(num_keys: list[int], teams: int, device: str) -> tuple[list[int], list[int]]:
    out = torch.full((2, 64), -1, dtype=torch.int32, device=device)
    given = torch.tensor(num_keys + [0] * (64 - len(num_keys)), device=device)
    _teams_kernel[1,](out, given, teams, 64)
    first, count = out[:, : len(num_keys)].tolist()
    assert not out[1, len(num_keys) :].any()
    return first, count


@pytest.mark.parametrize(
    "num_keys, teams, expected",
    [
        ([300] * 8, 49, [6] * 8),
        ([300] * 7 + [32768], 49, [1] * 7 + [39]),
        ([4096, 0, 8192, 0, 1], 33, [10, 0, 20, 0, 1]),
        ([5, 5, 5], 3, [1, 1, 1]),
        ([0, 1 << 20, 1 << 20], 132, [0, 66, 66]),
        ([0, 0], 49, [0, 0]),
    ],
)
def test_a_slot_has_a_team_and_more_as_its_keys_are_worth(exact_device, num_keys, teams, expected):
    first, count = teams_of(num_keys, teams, exact_device)
    assert count == expected
    assert first == [sum(count[:b]) for b in range(len(count))]
    assert sum(count) <= teams


def attend(monkeypatch, full: int, q: Tensor, cache: Tensor, rows: QueryRows) -> Tensor:
    monkeypatch.setattr(launch_plan, "FULL", full)
    rows.launches.clear()
    return output(launch_paged_attention, q, cache, rows)


def share_among(monkeypatch, programs: int) -> None:
    teams = Teams(32, programs, 4, 2, 168), Teams(0, programs, 4, 2)
    monkeypatch.setattr(launch_plan, "TEAMS", teams)


@pytest.mark.parametrize(
    "extents, dtype, C",
    [
        (RAGGED, FP32, 16),
        pytest.param(ONE_ROW, FP32, 96, marks=pytest.mark.slow),
        pytest.param(RAGGED, FP16, 96, marks=pytest.mark.slow),
        pytest.param(ONE_ROW, FP16, 16, marks=pytest.mark.slow),
    ],
)
# of a slot: of all its splits, of some, of one
@pytest.mark.parametrize(
    "programs", [37, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 400))]
)
def test_a_row_has_the_bits_of_a_program_that_walks_all(
    exact_device, monkeypatch, extents, dtype, C, programs
):
    share_among(monkeypatch, programs)
    sizes = {"group": 3, "G": 2, "C": C, "dtype": dtype, "device": exact_device}
    q, cache, rows = case("normal", extents, **sizes)
    expected = attend(monkeypatch, ONE_WALKS_ALL, q, cache, rows)
    assert not expected.isnan().any()
    assert len(launches_of(rows)) == 1
    assert torch.equal(attend(monkeypatch, TEAMS, q, cache, rows), expected)
    assert len(launches_of(rows)) == 2


def test_padding_slots_and_rows_change_nothing(exact_device, monkeypatch):
    share_among(monkeypatch, 20)
    extents = (200, 70, 330, 128), (4, 4, 4, 4)
    q, cache, rows = case("normal", extents, group=2, G=1, C=16, dtype=FP16, device=exact_device)
    expected = attend(monkeypatch, TEAMS, q, cache, rows)
    padding = torch.tensor([4, 5, 6, 7, 10, 11, 15], device=exact_device)
    padded = replace(
        rows,
        idx_mapping=rows.idx_mapping.index_fill(0, padding[:1] // 4, -1),
        positions=rows.positions.index_fill(0, padding, 0),
    )
    found = attend(monkeypatch, TEAMS, q, cache, padded)
    others = torch.ones(len(q), dtype=torch.bool, device=exact_device).index_fill(0, padding, False)
    assert torch.equal(found[others], expected[others])


def test_all_programs_fit_a_gpu_at_once():
    for B, Q in ((2, 4), (3, 1), (8, 4), (8, 5), (15, 6)):
        plan = plan_launch(B, Q, HeadShape(4, 8, 128, 2))
        assert plan.is_split, (B, Q)
        assert B <= plan.teams <= 396 // (8 * plan.tiles) <= plan.teams + 1
    assert plan_launch(1, 4, HeadShape(4, 8, 128, 2)).teams == 0
    assert plan_launch(8, 4, HeadShape(4, 8, 128, 2), has_paths=True).teams == 0
    assert plan_launch(64, 4, HeadShape(4, 8, 128, 2), most_keys=4096).teams == 0
    assert plan_launch(64, 4, HeadShape(4, 8, 128, 2)).teams == 264 // 8  # of long slots
    assert plan_launch(8, 4, HeadShape(4, 8, 256, 2)).teams == 264 // 8  # two a multiprocessor


@pytest.mark.gpu
@pytest.mark.parametrize("query_lens", [(1,) * 11, (4,) * 11, (6, 1, *(5,) * 9)])
@pytest.mark.parametrize("programs", [8, 132, 396, 2112])
@pytest.mark.parametrize("dtype, C", [(BF16, 128), (FP16, 96), (BF16, 256), (FP32, 64)])
def test_a_gpu_gives_equal_bits_around_every_border(monkeypatch, query_lens, programs, dtype, C):
    torch.manual_seed(0)
    sizes = {"group": 4, "G": 2, "C": C, "dtype": dtype, "device": "cuda"}
    q, cache, rows = case("normal", (BORDERS, query_lens), **sizes)
    expected = attend(monkeypatch, ONE_WALKS_ALL, q, cache, rows)
    assert expected.isfinite().all()
    share_among(monkeypatch, programs)
    assert torch.equal(attend(monkeypatch, TEAMS, q, cache, rows), expected)
