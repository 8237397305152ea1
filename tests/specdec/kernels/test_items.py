"""Which program of persistent/ makes what: every sum once, whatever is cut or relayed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdec.kernels import tile_order
from specdec.kernels.persistent import items
from specdec.kernels.persistent.form import BLOCK_K, LEFT_SUMS, Form, Sizes
from specdec.kernels.tile_shapes import RELAY, row_pieces

K = 4096
PROGRAMS = 132
# block_n as the results have it, block_m, cuts
FORMS = [(128, 128, 1), (128, 192, 1), (128, 128, 2), (128, 128, 4), (64, 256, 2)]
FORMS += [(96, 128, 2), (96, 128, 4), (128, 128, RELAY), (128, 192, RELAY)]


@pytest.fixture
def programs(monkeypatch):
    """programs(form, T, N): what each program makes, by items.py's functions as Python's."""
    current = SimpleNamespace(id=0, count=0)
    fake = SimpleNamespace(
        cdiv=lambda a, b: (a + b - 1) // b,
        where=torch.where,
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        program_id=lambda axis: torch.tensor(current.id),
        num_programs=lambda axis: torch.tensor(current.count),
        int32=torch.int64,
        constexpr=None,
    )
    for module in (items, tile_order):
        for name, function in list(vars(module).items()):
            if hasattr(function, "fn"):
                monkeypatch.setattr(module, name, function.fn)
    monkeypatch.setattr(items, "gl", fake)
    monkeypatch.setattr(tile_order, "tl", fake)

    def each(form, T, N):
        rows, _ = row_pieces(form.block_m)
        m_tiles = -(-T // form.block_m)
        count = PROGRAMS - PROGRAMS % m_tiles if form.form.is_relay else PROGRAMS
        splits = form.form.splits // form.form.walked
        current.count = min(splits * -(-N // form.form.height) * m_tiles, count)
        ring = SimpleNamespace(x=SimpleNamespace(shape=(4, rows, BLOCK_K)))
        for place in range(current.count):
            current.id = place
            yield made(form.form, ring, Sizes(*map(torch.tensor, (T, N, K))))

    return each


def made(FORM, ring, sizes):
    """Of one program, in order: split, first row of W and of x, rows of x, blocks of K."""
    extent = items.extent_of(ring, sizes, FORM)
    all_blocks = tile_order.split_blocks(sizes.K, BLOCK_K, FORM.splits)
    rows = ring.x.shape[1] + FORM.tail
    found = []

    def add(place, num_rows, first, end):
        found.append((*map(int, place), num_rows, int(first), int(end)))

    share = items.share_of(extent, ring, sizes, FORM) if FORM.is_relay else None
    if FORM.is_relay and share.left_at > 0:
        add(items.place_of_item(share.left, ring, extent, FORM), rows, 0, share.left_at)
    for i in range(items.num_own(extent, share, FORM)):
        item = items.own_item(torch.tensor(i), extent, share, FORM)
        add(items.place_of_item(item, ring, extent, FORM), rows, 0, all_blocks)
    if FORM.cuts > 1:
        count = items.gl.num_programs(0)
        for i in range(items.gl.program_id(0), extent.num_cut, count):
            place = items.place_of_part(torch.tensor(i), ring, extent, FORM)
            add(place, rows // FORM.cuts, 0, all_blocks)
    if FORM.is_relay and share.taken_at > 0:
        place = items.place_of_item(share.taken, ring, extent, FORM)
        add(place, rows, share.taken_at, all_blocks)
    return found


def form_of(height, block_m, cuts, splits, walked):
    form = Form(
        splits=splits,
        walked=walked,
        is_gated=False,
        has_bias=False,
        tail=row_pieces(block_m)[1],
        cuts=max(cuts, 1),
        is_relay=cuts == RELAY,
        num_left=LEFT_SUMS,
        num_stages=4,
        height=height,
        groups=2,
        copy_registers=40,
        is_late=False,
        has_turns=False,
    )
    return SimpleNamespace(form=form, block_m=block_m)


@pytest.mark.parametrize("height, block_m, cuts", FORMS)
@pytest.mark.parametrize("splits, walked", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("T, N", [(1, 4096), (33, 14336), (320, 6144), (384, 14336), (512, 1000)])
def test_every_sum_is_made_once(programs, height, block_m, cuts, splits, walked, T, N):
    if cuts == RELAY and walked > 1:
        pytest.skip("a relay's programs add one split")
    form = form_of(height, block_m, cuts, splits, walked)
    n_tiles = -(-N // height)
    blocks = int(K / splits / BLOCK_K)
    counts = np.zeros((splits // walked, n_tiles, blocks, T), int)
    for found in programs(form, T, N):
        for split, n0, m0, num_rows, first, end in found:
            assert n0 % height == 0
            assert m0 < T, "a part that no row has"
            counts[split, n0 // height, first:end, m0 : m0 + num_rows] += 1
    assert counts.min() == counts.max() == 1


def test_rows_that_fill_half_of_a_tile_cost_half_of_it(programs):
    """By rows of x of the busiest program."""

    def busiest(T, cuts):
        form = form_of(128, 128, cuts, 1, 1)
        each = programs(form, T, 14336)
        return max(sum(rows for _, _, _, rows, _, _ in found) for found in each)

    assert busiest(320, 1) == 3 * 128  # 336 items, the last 112 half empty
    assert busiest(320, 2) == 128 + 3 * 64  # 132, and 92 cut in two, and 112 halves
    assert busiest(384, 2) == 2 * 128 + 2 * 64  # 264, and 72 cut in two
