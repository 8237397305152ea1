"""Pairs of row and slot by expert: kernel == twin, and every pair once, in order."""

import pytest
import torch

from specdec.kernels.experts.group import group, group_ref, most_tiles
from tests.specdec.kernels.by_kernel import by_kernel
from tests.specdec.kernels.expert_cases import choices

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return request.param


@pytest.mark.parametrize("how", ["drawn", "one", "padded", "nobody"])
@pytest.mark.parametrize("T, E, k", [(65, 128, 8), (100, 12, 3), (256, 8, 2), (1, 64, 1)])
@pytest.mark.parametrize("block_m", [16, 128])
def test_the_kernels_group_as_the_twin_does(device, T, E, k, how, block_m):
    ids = choices(T, E, k, device, how)
    found = by_kernel(group)(ids, E, block_m)
    expected = group_ref(ids, E, block_m)
    num_placed = int((ids < E).sum())
    assert torch.equal(found.pair_P[:num_placed], expected.pair_P[:num_placed])
    for each, other in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(each, other)


@pytest.mark.parametrize("how", ["drawn", "one", "padded", "nobody"])
def test_every_pair_of_an_expert_is_in_one_of_its_tiles(how):
    torch.manual_seed(0)
    T, E, k, block_m = 50, 12, 3, 8
    ids = choices(T, E, k, "cpu", how)
    pairs, tiles, places, count = group_ref(ids, E, block_m)
    assert len(tiles) == most_tiles(T * k, E, block_m)
    found = {e: [] for e in range(E)}
    for expert, first, last in tiles.tolist():
        found[expert] += pairs[first : min(first + block_m, last)].tolist()
    flat = ids.flatten().tolist()
    assert found == {e: [p for p, each in enumerate(flat) if each == e] for e in range(E)}
    for p, place in enumerate(places.tolist()):
        assert place == -1 if flat[p] == E else pairs[place] == p
    is_tile = [first < last for _, first, last in tiles.tolist()]
    assert is_tile == [i < count for i in range(len(tiles))]


@pytest.mark.parametrize("num_pairs", range(1, 40))
def test_tiles_suffice_for_any_choice(num_pairs):
    """Of all ways to share pairs out, many experts with one more than whole tiles need most."""
    for E in (1, 3, 8):
        rest, block_m = num_pairs, 4
        counts = []
        for _ in range(E):
            counts.append(min(rest, 1 if len(counts) < E - 1 else rest))
            rest -= counts[-1]
        needed = sum(-(-count // block_m) for count in counts)
        assert needed <= most_tiles(num_pairs, E, block_m)
