"""What ranks write into each other's memory arrives whole, by rank, and nothing older with it.

One process has the memory of all ranks here, and runs their kernels one after another: first so
that none waits, when all of them write, and then again, when each finds what was written.
"""

import threading
import time
from functools import partial

import pytest
import torch

from specdec.kernels import push as module
from specdec.kernels.push import (
    GAVE_UP,
    Boxes,
    can_push,
    push_all,
    push_in_all_forms,
    push_rows,
)
from specdec.kernels.sum_order import add_parts

NUMBERS = 16 * module.BLOCK
SHAPES = [
    *(((2,), torch.float32), ((7,), torch.int64), ((3, 1000), torch.bfloat16)),
    *(((9, 1000), torch.float32), ((3, 5000), torch.bfloat16)),
]


@pytest.fixture(autouse=True)
def small_boxes(monkeypatch):
    monkeypatch.setattr(module, "NUMBERS", NUMBERS)
    monkeypatch.setattr(module, "TRIES", 1)


FORMS = {(1, False), (2, False), (1, True)}  # parts, and whether rows are dealt


class Ranks:
    def __init__(self, n):
        self.memory = [torch.zeros(2 * n * NUMBERS, dtype=torch.int64) for _ in range(n)]
        addresses_n = torch.tensor([each.data_ptr() for each in self.memory])
        self.boxes = [
            Boxes(
                addresses_n=addresses_n,
                epochs=torch.ones(NUMBERS // module.BLOCK, dtype=torch.int32),
                stopped=torch.zeros(1, dtype=torch.int32),
                rank=rank,
            )
            for rank in range(n)
        ]

    def all(self, calls):
        """Make one exchange: call(boxes) of each rank."""
        for boxes, call in zip(self.boxes, calls, strict=True):
            before = boxes.epochs.clone()
            boxes.stopped.fill_(1)
            call(boxes)
            boxes.stopped.fill_(0)
            boxes.epochs.copy_(before)
        for boxes, call in zip(self.boxes, calls, strict=True):
            call(boxes)


def gathered(ranks, own):
    """Exchange own[rank], [P, ...] each, as all ranks do; returns what each has."""
    out = [each.new_empty(len(own), *each.shape[1:]) for each in own]
    ranks.all([partial(push_all, *each) for each in zip(own, out, strict=True)])
    return out


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_rank_has_all_tensors_by_rank(n):
    torch.manual_seed(0)
    ranks = Ranks(n)
    for turn in range(3):  # a box is used again
        for shape, dtype in SHAPES:
            own = [(100 * torch.randn(1, *shape) + 7 * turn).to(dtype) for _ in range(n)]
            for found in gathered(ranks, own):
                assert torch.equal(found, torch.cat(own)), (turn, shape)


def test_all_bits_arrive():
    own = [torch.tensor([[-0.0, torch.inf, torch.nan, -1e-42]]), torch.full((1, 4), -torch.nan)]
    for found in gathered(Ranks(2), own):
        assert torch.equal(found.view(torch.int32), torch.cat(own).view(torch.int32))


@pytest.mark.parametrize("width", [300, 1200])
def test_parts_are_added_in_the_order_of_splits(width):
    torch.manual_seed(0)
    own = [torch.randn(4, 5, width) for _ in range(2)]
    expected = torch.stack([add_parts(each) for each in own])
    assert not torch.equal(expected, torch.stack([each.sum(0) for each in own]))
    for found in gathered(Ranks(2), own):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("width", [100, 1000])
@pytest.mark.parametrize(("n", "T"), [(2, 5), (4, 39), (4, 40)])
def test_each_rank_is_dealt_its_rows_of_all(n, T, width):
    torch.manual_seed(0)
    ranks = Ranks(n)
    each = -(-T // n)
    for _ in range(3):
        own = [torch.randn(T, width) for _ in range(n)]
        out = [own[0].new_empty(n, min(each, T - rank * each), width) for rank in range(n)]
        both = zip(own, out, strict=True)
        ranks.all([partial(push_rows, *rows, num_rows=each) for rows in both])
        for rank, found in enumerate(out):
            mine = slice(rank * each, rank * each + each)
            assert torch.equal(found, torch.stack([rows[mine] for rows in own]))


@pytest.mark.parametrize("width", [8, 2056])
def test_a_rank_waits_for_what_comes_late(width):
    ranks = Ranks(2)
    first, second = ([torch.full((1, width), base + r) for r in range(2)] for base in (10.0, 20.0))
    for _ in range(2):  # both boxes hold something then
        gathered(ranks, first)
    boxes, other = ranks.boxes
    before = ranks.memory[0].clone()
    other.stopped.fill_(1)
    push_all(second[1], torch.empty(2, width), other)
    later, is_new = ranks.memory[0].clone(), ranks.memory[0] != before
    ranks.memory[0].copy_(before)

    def write():
        for i in is_new.nonzero()[:, 0].split(300):
            time.sleep(0.05)
            ranks.memory[0][i] = later[i]

    writer = threading.Thread(target=write)
    writer.start()
    out = torch.empty(2, width)
    push_all(second[0], out, boxes)
    writer.join()
    assert torch.equal(out, torch.cat(second))


@pytest.mark.parametrize("width", [8, 2056])
def test_a_rank_gives_up_where_another_never_comes(monkeypatch, width):
    monkeypatch.setattr(module, "LONGEST", 3)
    ranks = Ranks(2)
    boxes = ranks.boxes[0]
    push_all(torch.ones(1, width), torch.empty(2, width), boxes)
    assert boxes.stopped.item() == GAVE_UP
    push_all(torch.ones(1, width), torch.empty(2, width), boxes)  # at once


def test_every_form_is_launched(monkeypatch):
    ranks = Ranks(2)
    boxes = ranks.boxes[0]
    boxes.stopped.fill_(1)
    forms = set()
    real = module._launch

    def launch(own, out, boxes, each, total, **constants):
        forms.add(tuple(constants.values()))
        real(own, out, boxes, each, total, **constants)

    monkeypatch.setattr(module, "_launch", launch)
    push_in_all_forms(boxes, 2)
    assert forms == FORMS


def test_what_has_no_room_is_not_pushed():
    sizes = (0, 4, 8, 12, 4 * NUMBERS - 8, 4 * NUMBERS, 4 * NUMBERS + 8)
    assert [size for size in sizes if can_push(size)] == [8, 4 * NUMBERS - 8, 4 * NUMBERS]
