"""Teams share a long request among short ones, and its rows keep their bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.kernels import next_power_of_2
from specdec.kernels.attention import combine, launch_plan
from specdec.kernels.attention.arguments import workspace_size
from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.attention.launch_plan import HeadShape, Teams, query_tile
from specdec.kernels.attention.query_rows import QueryRows
from specdec.kernels.attention.splits import num_splits
from tests.specdec.kernels.attention_cases import BF16, FP16, FP32, case, launches_of, output

SPLITS_SHARED, ONE_WALKS_ALL = 1 << 30, 1  # programs that fill the GPU
UNIFORM = (129, 10, 300, 128, 5, 64, 1), (1,) * 7
RAGGED = (130, 10, 300, 128, 5, 64), (2, 3, 6, 2, 0, 3)


@pytest.fixture(autouse=True)
def few_teams(monkeypatch):
    """Each program has several splits, and splits of 64 keys are enough to be long."""
    monkeypatch.setattr(launch_plan, "ALONE_KEYS", 128)
    share_among(monkeypatch, 3)


def share_among(monkeypatch, programs: int) -> None:
    teams = Teams(16, programs, 2, 2), Teams(0, programs, 4, 2)
    monkeypatch.setattr(launch_plan, "LONG_TEAMS", teams)
    monkeypatch.setattr(combine, "COMBINERS", max(programs - 1, 1))


def attend(monkeypatch, full: int, q: Tensor, cache: Tensor, rows: QueryRows) -> Tensor:
    monkeypatch.setattr(launch_plan, "FULL", full)
    rows.launches.clear()
    return output(launch_paged_attention, q, cache, rows)


def just_full(rows: QueryRows, group: int, G: int) -> int:
    """As many programs as the launch has: no splits are shared but those of long slots."""
    heads = HeadShape(group, G, 16, 2)
    tokens = query_tile(rows.max_query_len * group, heads).rows // next_power_of_2(group)
    return len(rows.idx_mapping) * -(-rows.max_query_len // tokens) * G


def with_room(rows: QueryRows, num_slots: int, H: int, C: int) -> QueryRows:
    """A workspace that holds the rows of so many long slots and almost another's, all NaN."""
    size = slot_size(rows, H, C)
    space = torch.full(((num_slots + 1) * size - 1,), torch.nan, device=rows.positions.device)
    return replace(rows, workspace=space)


def slot_size(rows: QueryRows, H: int, C: int) -> int:
    return workspace_size(rows.max_query_len, H, C, rows.max_seq_len)


@pytest.mark.parametrize(
    "extents, dtype, C",
    [
        pytest.param(UNIFORM, FP32, 16, marks=pytest.mark.slow),
        pytest.param(UNIFORM, FP16, 16, marks=pytest.mark.slow),
        pytest.param(RAGGED, FP32, 16, marks=pytest.mark.slow),
        (RAGGED, FP16, 16),
        pytest.param(UNIFORM, FP16, 96, marks=pytest.mark.slow),
        pytest.param(RAGGED, FP32, 96, marks=pytest.mark.slow),
    ],
)
def test_a_row_has_the_same_bits_alone_and_shared(exact_device, monkeypatch, extents, dtype, C):
    sizes = {"group": 3, "G": 1, "C": C, "dtype": dtype, "device": exact_device}
    q, cache, rows = case("normal", extents, **sizes)
    expected = attend(monkeypatch, SPLITS_SHARED, q, cache, rows)
    assert not expected.isnan().any()
    rows = with_room(rows, 2, H=3, C=C)
    full = just_full(rows, 3, 1)
    assert torch.equal(attend(monkeypatch, full, q, cache, rows), expected)
    assert len(launches_of(rows)) == 3
    end = 2 * slot_size(rows, H=3, C=C)
    assert not rows.workspace[end - 2 : end].isnan().any()  # of the last long slot's last split
    assert rows.workspace[end:].isnan().all()
    monkeypatch.setattr(launch_plan, "ALONE_KEYS", None)
    assert torch.equal(attend(monkeypatch, full, q, cache, rows), expected)
    assert len(launches_of(rows)) == 1


def test_what_was_added_up_may_be_forgotten(forget, monkeypatch):
    q, cache, rows = case("normal", UNIFORM, group=3, G=1, C=96, dtype=FP16, device="cpu")
    rows = with_room(rows, 2, H=3, C=96)
    expected = attend(monkeypatch, just_full(rows, 3, 1), q, cache, rows)
    held = rows.workspace.isfinite().sum()
    forget()
    for _ in range(2):
        assert torch.equal(attend(monkeypatch, just_full(rows, 3, 1), q, cache, rows), expected)
    assert rows.workspace.isfinite().sum() < held // 10


@pytest.mark.parametrize(
    "room, teams, left_out",
    [
        *((2, 3, ()), (3, 3, (0, 2, 3))),
        *(
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in ((0, 3, ()), (None, 5, (0, 2, 3)), (None, 2, ()))
        ),
    ],
)
def test_long_slots_are_shared_if_there_are_room_and_teams_for_all_of_them(
    exact_device, monkeypatch, room, teams, left_out
):
    share_among(monkeypatch, 2 * teams)
    extents = (129, 10, 200, 130), (1,) * 4
    sizes = {"group": 1, "G": 2, "C": 16, "dtype": FP16, "device": exact_device}
    q, cache, rows = case("normal", extents, **sizes)
    expected = attend(monkeypatch, SPLITS_SHARED, q, cache, rows)
    rows = rows if room is None else with_room(rows, room, H=2, C=16)
    assert torch.equal(attend(monkeypatch, 8, q, cache, rows), expected)
    alone = torch.full_like(q, torch.nan)
    _, _, walk = launches_of(rows)
    walk(alone, q, *cache.unbind(), None)
    assert alone.isnan().all((1, 2)).tolist() == [b in left_out for b in range(4)]
    if room == 2:
        assert rows.workspace.isnan().all()
    if room == 3:  # three splits of each head in the first slot
        acc = rows.workspace[: 2 * num_splits(200) * 16].view(2, -1, 16)
        assert acc[:, :3].isfinite().all()
        assert acc[:, 3:].isnan().all()
        assert rows.workspace[3 * slot_size(rows, H=2, C=16) :].isnan().all()


def test_a_slot_is_long_though_its_last_rows_are_padding(exact_device, monkeypatch):
    extents = (200, 70, 330), (4, 4, 4)
    sizes = {"group": 2, "G": 1, "C": 16, "dtype": FP16, "device": exact_device}
    q, cache, rows = case("normal", extents, **sizes)
    expected = attend(monkeypatch, SPLITS_SHARED, q, cache, rows)
    padding = torch.tensor([2, 3, 9, 10, 11], device=exact_device)
    rows = replace(rows, positions=rows.positions.index_fill(0, padding, 0))
    rows = with_room(rows, 2, H=2, C=16)
    found = attend(monkeypatch, just_full(rows, 2, 1), q, cache, rows)
    others = torch.ones(len(q), dtype=torch.bool, device=exact_device).index_fill(0, padding, False)
    assert torch.equal(found[others], expected[others])
    alone = torch.full_like(q, torch.nan)
    launches_of(rows)[2](alone, q, *cache.unbind(), None)
    assert alone.isnan().all((1, 2)).tolist() == [True] * 4 + [False] * 4 + [True] * 4


@pytest.mark.parametrize("first", [316, 318])
def test_rows_of_padding_behind_the_end_of_the_context_have_no_splits(
    exact_device, monkeypatch, first
):
    """Where the longest context ends at a border, a row behind it would be in one split more."""
    extents, longest = ((200, 70, 320), (4, 4, 4)), 320
    sizes = {"group": 2, "G": 1, "C": 16, "dtype": FP16, "device": exact_device}
    q, cache, rows = case("normal", extents, **sizes)
    last_rows = torch.arange(first, first + 4, device=exact_device)
    num_rows = 8 + int((last_rows < longest).sum())
    last_rows = torch.where(last_rows < longest, last_rows, 0)
    positions = torch.cat([rows.positions[:8], last_rows])
    rows = replace(rows, positions=positions, max_seq_len=longest)
    monkeypatch.setattr(launch_plan, "ALONE_KEYS", None)
    expected = attend(monkeypatch, ONE_WALKS_ALL, q, cache, rows)
    monkeypatch.setattr(launch_plan, "ALONE_KEYS", 128)
    rows = with_room(rows, 2, H=2, C=16)
    found = attend(monkeypatch, just_full(rows, 2, 1), q, cache, rows)
    assert len(launches_of(rows)) == 3
    assert torch.equal(found[:num_rows], expected[:num_rows])
    assert rows.workspace[2 * slot_size(rows, H=2, C=16) :].isnan().all()


def test_teams_write_nothing_where_no_slot_is_long(exact_device, monkeypatch):
    sizes = {"group": 1, "G": 1, "C": 16, "dtype": FP16, "device": exact_device}
    q, cache, rows = case("normal", ((128, 128, 100), (2, 2, 2)), **sizes)
    expected = attend(monkeypatch, SPLITS_SHARED, q, cache, rows)
    table = torch.nn.functional.pad(rows.block_table, (0, 1))  # a slot may have 192 keys
    rows = with_room(replace(rows, block_table=table, max_seq_len=192), 3, H=1, C=16)
    assert torch.equal(attend(monkeypatch, 3, q, cache, rows), expected)
    assert rows.workspace.isnan().all()
    out = torch.full_like(q, torch.nan)
    share, combine_long, _ = launches_of(rows)
    share(out, q, *cache.unbind(), None)
    combine_long(out, q, *cache.unbind(), None)
    assert out.isnan().all()


def test_padding_slots_are_not_long_and_change_nothing(exact_device, monkeypatch):
    extents = (1, 300, 1, 64, 1), (1,) * 5
    sizes = {"group": 2, "G": 1, "C": 16, "dtype": FP16, "device": exact_device}
    q, cache, rows = case("normal", extents, **sizes)
    expected = attend(monkeypatch, SPLITS_SHARED, q, cache, rows)
    padding = torch.tensor([0, 2, 4], device=exact_device)
    idx = rows.idx_mapping.index_fill(0, padding, -1)
    found = attend(monkeypatch, 5, q, cache, replace(rows, idx_mapping=idx))
    assert torch.equal(found[1::2], expected[1::2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype, C", [(FP32, 16), (FP16, 16), (FP16, 96)])
@pytest.mark.parametrize("alone_keys", [1024, 2048])
def test_the_interpreter_gives_equal_bits_around_every_border(
    exact_interpreter, monkeypatch, dtype, C, alone_keys
):
    monkeypatch.setattr(launch_plan, "ALONE_KEYS", alone_keys)
    for lengths in ((4095, 5, 4096, 1, 4097, 6), (8191, 9, 8193, 10, 1153, 11), (8705, 9, 7)):
        extents = lengths, (4, 4, 3, 1, 4, 2)[: len(lengths)]
        sizes = {"group": 2, "G": 1, "C": C, "dtype": dtype, "device": "cpu"}
        q, cache, rows = case("normal", extents, **sizes)
        expected = attend(monkeypatch, SPLITS_SHARED, q, cache, rows)
        for full in (ONE_WALKS_ALL, just_full(rows, 2, 1), 2 * just_full(rows, 2, 1)):
            assert torch.equal(attend(monkeypatch, full, q, cache, rows), expected), lengths


@pytest.mark.gpu
@pytest.mark.parametrize("query_lens", [(1,) * 34, (4,) * 34, (6, 1, *(5,) * 32)])
@pytest.mark.parametrize("programs", [24, 528])
@pytest.mark.parametrize(
    "alone_keys, room, C", [(2048, 3, 128), (4096, 34, 128), (None, 0, 128), (2048, 3, 96)]
)
def test_a_gpu_gives_equal_bits_around_every_border(
    monkeypatch, query_lens, programs, alone_keys, room, C
):
    torch.manual_seed(0)
    monkeypatch.setattr(launch_plan, "ALONE_KEYS", alone_keys)
    share_among(monkeypatch, programs)
    lengths = (32768, 4095, 8193, 4097, 4096, 1025, 8192, 1153, 9000, *range(300, 325))
    sizes = {"group": 4, "G": 8, "C": C, "dtype": BF16, "device": "cuda"}
    q, cache, rows = case("normal", (lengths, query_lens), **sizes)
    expected = attend(monkeypatch, SPLITS_SHARED, q, cache, rows)
    assert expected.isfinite().all()
    rows = with_room(rows, room, H=32, C=C)
    for full in (ONE_WALKS_ALL, 256):
        assert torch.equal(attend(monkeypatch, full, q, cache, rows), expected), full


def test_no_team_looks_for_long_slots_in_a_step_that_has_none(exact_device, monkeypatch):
    """Its bound says so, whatever the requests may have later."""
    sizes = {"group": 1, "G": 1, "C": 16, "dtype": FP16, "device": exact_device}
    q, cache, rows = case("normal", ((128, 128, 100), (2, 2, 2)), **sizes)
    table = torch.nn.functional.pad(rows.block_table, (0, 1))
    found = {}
    for longest in (128, 129):
        rows = replace(rows, block_table=table, max_seq_len=longest)
        found[longest] = attend(monkeypatch, 3, q, cache, rows)
        assert len(launches_of(rows)) == (3 if longest > 128 else 1)
    assert torch.equal(found[128], found[129])
