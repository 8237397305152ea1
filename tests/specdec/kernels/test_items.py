"""Which program of persistent/ makes what: every sum once, whatever is cut."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdec.kernels import tiles
from specdec.kernels.persistent import items
from specdec.kernels.persistent.kernel import Sizes, Variant
from specdec.kernels.persistent.launch import BLOCK_K
from specdec.kernels.tile_shapes import row_pieces

K = 4096
PROGRAMS = 132
# block_n as the results have it, block_m, cuts
FORMS = [(128, 128, 1), (128, 192, 1), (128, 128, 2), (128, 128, 4), (64, 256, 2)]
FORMS += [(96, 128, 2), (96, 128, 4)]


@pytest.fixture
def programs(monkeypatch):
    """programs(variant, T, N): what each program makes, by items.py's functions as Python's."""
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
    for module in (items, tiles):
        for name, function in list(vars(module).items()):
            if hasattr(function, "fn"):
                monkeypatch.setattr(module, name, function.fn)
    monkeypatch.setattr(items, "gl", fake)
    monkeypatch.setattr(tiles, "tl", fake)

    def each(variant, T, N):
        rows, _ = row_pieces(variant.block_m)
        m_tiles = -(-T // variant.block_m)
        splits = variant.variant.splits // variant.variant.walked
        current.count = min(splits * -(-N // variant.variant.height) * m_tiles, PROGRAMS)
        ring = SimpleNamespace(x=SimpleNamespace(shape=(4, rows, BLOCK_K)))
        for place in range(current.count):
            current.id = place
            yield made(variant.variant, ring, Sizes(*map(torch.tensor, (T, N, K))))

    return each


def made(VARIANT, ring, sizes):
    """List what one program makes, in order: split, first row of W and of x, rows of x."""
    workload = items.extent_of(ring, sizes, VARIANT)
    rows = ring.x.shape[1] + VARIANT.tail
    found = []

    def add(place, num_rows):
        found.append((*map(int, place), num_rows))

    for i in range(items.num_own(workload)):
        add(items.place_of_item(items.own_item(torch.tensor(i)), ring, workload, VARIANT), rows)
    if VARIANT.cuts > 1:
        count = items.gl.num_programs(0)
        for i in range(items.gl.program_id(0), workload.num_cut, count):
            place = items.place_of_part(torch.tensor(i), ring, workload, VARIANT)
            add(place, rows // VARIANT.cuts)
    return found


def variant_of(height, block_m, cuts, splits, walked):
    variant = Variant(
        splits=splits,
        walked=walked,
        is_gated=False,
        has_bias=False,
        tail=row_pieces(block_m)[1],
        cuts=cuts,
        num_stages=4,
        height=height,
        groups=2,
        copy_registers=40,
        is_late=False,
        has_turns=False,
        form="plain",
        num_scales=0,
        is_shared=False,
    )
    return SimpleNamespace(variant=variant, block_m=block_m)


@pytest.mark.parametrize("height, block_m, cuts", FORMS)
@pytest.mark.parametrize("splits, walked", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("T, N", [(1, 4096), (33, 14336), (320, 6144), (384, 14336), (512, 1000)])
def test_every_sum_is_made_once(programs, height, block_m, cuts, splits, walked, T, N):
    variant = variant_of(height, block_m, cuts, splits, walked)
    n_tiles = -(-N // height)
    counts = np.zeros((splits // walked, n_tiles, T), int)
    for found in programs(variant, T, N):
        for split, n0, m0, num_rows in found:
            assert n0 % height == 0
            assert m0 < T, "a part that no row has"
            counts[split, n0 // height, m0 : m0 + num_rows] += 1
    assert counts.min() == counts.max() == 1


def test_rows_that_fill_half_of_a_tile_cost_half_of_it(programs):
    """By rows of x of the busiest program."""

    def busiest(T, cuts):
        variant = variant_of(128, 128, cuts, 1, 1)
        each = programs(variant, T, 14336)
        return max(sum(rows for _, _, _, rows in found) for found in each)

    assert busiest(320, 1) == 3 * 128  # 336 items, the last 112 half empty
    assert busiest(320, 2) == 128 + 3 * 64  # 132, and 92 cut in two, and 112 halves
    assert busiest(384, 2) == 2 * 128 + 2 * 64  # 264, and 72 cut in two
