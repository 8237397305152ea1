"""d2t: offsets in, absolute ids out; everything else is refused."""

from pathlib import Path

import torch

from weights.draft.vocab import absolute_ids, check_mask, is_identity
from weights.errors import Problems

V = 20


def check(d2t, t2d=None):
    problems = Problems(Path("dir"))
    ids = absolute_ids(torch.tensor(d2t), V, "f: d2t", problems)
    if t2d is not None:
        check_mask(t2d, ids, "f: t2d", problems)
    return ids, problems.lines


def mask(*ids):
    covered = torch.zeros(V, dtype=torch.bool)
    covered[list(ids)] = True
    return covered


def test_offsets_become_target_ids_in_any_order():
    ids, lines = check([5, -1, 17, 0], mask(5, 0, 19, 3))
    assert ids.tolist() == [5, 0, 19, 3]
    assert ids.dtype == torch.int64
    assert lines == []


def test_int32_offsets_are_read_as_int64():
    problems = Problems(Path("dir"))
    offsets = torch.tensor([1, 1], dtype=torch.int32)
    assert absolute_ids(offsets, V, "f", problems).dtype == torch.int64


def test_ids_outside_the_vocabulary_are_refused():
    assert check([0, 0, 18, 18])[1] == ["f: d2t maps 2 draft tokens outside 0..19, the first to 20"]
    assert "outside 0..19" in check([-1, 0])[1][0]


def test_a_target_id_twice_is_refused():
    assert "several draft tokens to one target id, 1 times, 2" in check([2, 1, 1])[1][0]


def test_absolute_ids_are_refused_with_the_reason():
    for ids in ([1, 3, 9, 18], [19, 4, 17, 18]):
        line = "offsets are needed: target id = draft id + d2t[draft id]"
        assert check(ids)[1] == [f"f: d2t holds absolute target ids, {line}"]


def test_t2d_reveals_absolute_ids_that_stay_inside():
    ids = [2, 5, 6, 9]
    assert check(ids)[1] == []
    assert "they are absolute target ids" in check(ids, mask(*ids))[1][0]


def test_a_mask_that_disagrees_is_refused():
    assert check([0, 0, 0], mask(0, 1, 4))[1] == ["f: t2d and d2t disagree about 2 target tokens"]


def test_ids_outside_the_vocabulary_leave_the_mask_unchecked():
    assert len(check([0, 0, 18], mask(0, 1))[1]) == 1


def test_the_identity_is_recognised():
    assert is_identity(torch.arange(V), V)
    assert not is_identity(torch.arange(V).flip(0), V)
    assert not is_identity(torch.arange(4), V)
