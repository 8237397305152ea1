"""Tiles of experts by persistent/: what is launched, which no interpreter runs.

On a GPU test_expert_products.py compares bits, and test_items.py says which program makes what.
"""

import itertools
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from specdec.kernels.experts.products import launch_expert_parts
from specdec.kernels.experts.tiles import BESIDE, PERSISTENT_ROWS
from specdec.kernels.persistent import launch, results
from specdec.kernels.tile_shapes import SHARED_MEMORY, rows_of_w
from tests.specdec.kernels.expert_cases import choices, experts, persistent


@pytest.mark.parametrize("block_m", PERSISTENT_ROWS)
def test_tiles_of_persistent_kernels_fit(block_m):
    for tiles in persistent(block_m):
        for kind, shape in (("gate", tiles.gate_up), ("split", tiles.down)):
            ring = (rows_of_w(kind, shape) + block_m) * shape.block_k * 2 * shape.num_stages
            assert ring + BESIDE[shape.block_n] <= SHARED_MEMORY
            assert shape.num_stages >= 4


@pytest.mark.parametrize("block_m", PERSISTENT_ROWS)
def test_persistent_kernels_are_told_where_an_experts_rows_are(block_m, monkeypatch):
    launched = []
    kernel = MagicMock(__getitem__=lambda _, grid: lambda *a, **k: launched.append((grid, a, k)))
    monkeypatch.setattr(launch, "persistent_kernel", kernel)
    monkeypatch.setattr(launch, "num_multiprocessors", lambda _: 132)
    E, k, D, I, T = 3, 2, 128, 192, 70
    gate_up, down = experts(E, D, I, "cpu", torch.bfloat16)
    gate, up = gate_up.chunk(2, dim=1)
    for tiles in persistent(block_m):
        launch_expert_parts(
            torch.zeros(T, D).bfloat16(), choices(T, E, k, "cpu"), gate_up, down, tiles
        )
        (grid, first, options), (_, second, _) = launched
        launched.clear()
        assert second[10:] == (T, D, I)
        assert grid == (min(132, -(-I // options["VARIANT"].height) * len(first[7])),)
        w, w_up, w_down = (numbers_of(desc) for desc in (*first[1:3], second[1]))
        for e, n in itertools.product(range(E), (0, 64)):
            row = e * options["VARIANT"].expert_rows + n
            assert torch.equal(w_down[e * D + n :][:64], down[e, n : n + 64])
            if options["VARIANT"].has_turns:
                turns = w[row // 8 :][:8].transpose(0, 1).flatten(1, 2)
                assert torch.equal(turns, torch.stack([gate[e, n : n + 64], up[e, n : n + 64]]))
            else:
                assert torch.equal(w[row:][:64], gate[e, n : n + 64])
                assert torch.equal(w_up[row:][:64], up[e, n : n + 64])


@pytest.mark.parametrize("slots", [0, 2])
def test_an_experts_results_go_to_its_rows_alone(slots, monkeypatch):
    """By place, or by slot and row of their pairs, up to the last row and column."""
    T, N, first, last, n0 = 40, 72, 30, 51, 64
    pairs, out = torch.randperm(2 * T), torch.zeros(2 * T, N)
    fake = SimpleNamespace(
        constexpr=None,
        int64=torch.int64,
        SliceLayout=lambda *_: None,
        arange=lambda start, end, _: torch.arange(start, end),
        load=lambda at, mask, other: pairs[at.where(mask, 0)].where(mask, other),
        store=lambda at, y, mask: out.view(-1).index_put_((at[mask],), y[mask]),
    )
    monkeypatch.setattr(results, "gl", fake)
    monkeypatch.setattr(results, "_whole_lines", lambda _: None)
    y = torch.randn(32, 32)
    buffer = SimpleNamespace(shape=y.shape, load=lambda _: y)
    sizes = SimpleNamespace(T=T, N=N)
    of = SimpleNamespace(sizes=sizes, slots=slots, pair_ptr=0, out_ptr=0)
    results._write_rows.fn(of, last, first, n0, buffer)
    expected = torch.zeros(2, T, N) if slots else torch.zeros(2 * T, N)
    for i, place in enumerate(range(first, last)):
        at = (pairs[place] % 2, pairs[place] // 2) if slots else place
        expected[at][n0:] = y[i, : N - n0]
    assert torch.equal(out, expected.view(2 * T, N))


def numbers_of(desc):
    """All that a descriptor describes."""
    return desc.base.as_strided(desc.shape, desc.strides, desc.base.storage_offset())
