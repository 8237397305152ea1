"""Who is chosen, with which weights: kernel == twin, ties, padding, and rows among any others."""

import pytest
import torch

from specdec.kernels.experts.route import route, route_ref
from specdec.kernels.experts.router import launch_router, router_logits, router_splits
from specdec.kernels.linear import Sums
from tests.specdec.kernels.by_kernel import by_kernel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return request.param


def sums_of(logits_TE, splits=3):
    parts = torch.randn(splits, *logits_TE.shape, device=logits_TE.device)
    parts[0] = logits_TE
    return Sums(parts, None)


@pytest.mark.parametrize("E, k", [(8, 2), (12, 3), (64, 1), (128, 8)])
@pytest.mark.parametrize("is_renormalized", [False, True])
def test_the_kernel_chooses_as_the_twin_does(device, E, k, is_renormalized):
    logits = sums_of(torch.randn(19, E, device=device))
    slots = torch.arange(19, device=device)
    slots[::4] = -1
    found = by_kernel(route)(logits, k, is_renormalized, slots)
    expected = route_ref(logits, k, is_renormalized, slots, None)
    assert torch.equal(found.ids_TS, expected.ids_TS)
    torch.testing.assert_close(found.weights_TS, expected.weights_TS, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("choose", [by_kernel(route), route])
@pytest.mark.parametrize("is_renormalized", [False, True])
def test_weights_are_those_of_a_softmax(device, choose, is_renormalized):
    logits = torch.randn(9, 12, device=device) * 3
    bias = torch.randn(12, device=device)
    found = choose(Sums(logits[None], bias), 3, is_renormalized)
    weights, ids = torch.softmax(logits + bias, -1).topk(3)
    if is_renormalized:
        weights /= weights.sum(-1, keepdim=True)
    assert torch.equal(found.ids_TS.long(), ids)
    torch.testing.assert_close(found.weights_TS, weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("choose", [by_kernel(route), route])
def test_ties_go_to_the_lowest_id(device, choose):
    logits = torch.tensor(
        [[0.0, 2, 2, -1, 2], [0.0, -0.0, 0, -0.0, -1], [-1.0, -2, -2, -2, -3]], device=device
    )
    found = choose(Sums(logits[None], None), 3, True)
    assert found.ids_TS.tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2]]
    assert found.weights_TS[:2].tolist() == [[pytest.approx(1 / 3)] * 3] * 2


@pytest.mark.parametrize("choose", [by_kernel(route), route])
def test_padding_chooses_nobody(device, choose):
    """Whatever its logits are; rows that are some of a pass have their slots by number."""
    logits = torch.randn(4, 12, device=device)
    logits[1] = float("nan")
    slots = torch.tensor([5, -1, 7, 8, -1], device=device)
    found = choose(Sums(logits[None], None), 2, True, slots[:4])
    assert (found.ids_TS == 12).all(1).tolist() == [False, True, False, False]
    assert found.weights_TS[1].tolist() == [0, 0]
    rows = torch.tensor([4, 2, 5, -1], device=device)
    found = choose(Sums(logits[None], None), 2, True, slots, rows)
    assert (found.ids_TS == 12).all(1).tolist() == [True, False, True, True]
    assert found.ids_TS[1].tolist() != [12, 12]


@pytest.mark.parametrize("choose", [by_kernel(route), route])
def test_ids_are_experts_whatever_the_logits_are(device, choose):
    logits = torch.randn(3, 12, device=device)
    nan = torch.tensor(float("nan"))
    logits[0, ::2] = nan
    logits[0, ::4] = nan.copysign(torch.tensor(-1.0))
    logits[1] = nan
    logits[2] = float("-inf")
    ids = choose(Sums(logits[None], None), 4, True).ids_TS
    assert not (ids[0] % 2).any(), "the largest, whatever their sign"
    for row in ids.tolist():
        assert len(set(row)) == 4
        assert 0 <= min(row) <= max(row) < 12


@pytest.mark.parametrize("size", [2, 4])
def test_gpus_with_a_range_of_experts_choose_alike(device, size):
    """Each slot is one GPU's, where its place says; of padding none is."""
    E, k, T = 12, 3, 19
    logits = sums_of(torch.randn(T, E, device=device))
    slots = torch.arange(T, device=device)
    slots[::4] = -1
    whole = by_kernel(route)(logits, k, True, slots)
    each = E // size
    for rank in range(size):
        held = range(rank * each, (rank + 1) * each)
        found = by_kernel(route)(logits, k, True, slots, held=held)
        expected = route_ref(logits, k, True, slots, None, held)
        assert torch.equal(found.ids_TS, expected.ids_TS)
        assert torch.equal(found.places_TS, expected.places_TS)
        assert torch.equal(found.weights_TS, whole.weights_TS)
        is_mine = (whole.ids_TS >= held.start) & (whole.ids_TS < held.stop)
        assert is_mine.any()
        assert torch.equal(found.ids_TS, (whole.ids_TS - held.start).where(is_mine, each))
        assert (found.places_TS % k == torch.arange(k, device=device)).all()
        owner = found.places_TS // k
        assert torch.equal(owner, (whole.ids_TS // each).where(whole.ids_TS < E, 0))


def test_more_than_all_experts_are_refused():
    with pytest.raises(ValueError, match="13 experts a row, of 12"):
        route(Sums(torch.randn(1, 2, 12), None), 13, True)


def test_a_router_has_splits_by_its_weight_alone():
    assert router_splits(128, 2048) == 8
    assert router_splits(8, 4096) == 16
    assert router_splits(128, 1024) == 4
    assert router_splits(128, 2880) == router_splits(32, 2880) == 9
    assert router_splits(128, 1000) == 1
    assert router_splits(12, 100) == 1


@pytest.mark.parametrize("K, splits", [(640, 2), (960, 3)])
@pytest.mark.parametrize("rows", [1, 17, 70, 513])
def test_logits_are_unrounded_sums(device, rows, K, splits):
    dtype = torch.float16
    x = torch.randn(rows, K, device=device).to(dtype)
    weight = torch.randn(12, K, device=device).to(dtype)
    parts = launch_router(x, weight)
    assert parts.shape == (splits if rows <= 512 else 1, rows, 12)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(Sums(parts, None).finish(torch.float64), exact, rtol=0, atol=1e-3)
    found = router_logits(x, weight).finish(torch.float64)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "K", [pytest.param(512, marks=pytest.mark.slow), 960]
)  # two splits, and three
def test_a_row_chooses_alike_among_any_rows(exact_device, K):
    x = torch.randn(513, K, device=exact_device)
    weight = torch.randn(12, K, device=exact_device)
    choose = by_kernel(route)
    every = choose(Sums(launch_router(x, weight), None), 3, False)
    for first, last in ((0, 1), (3, 20)):
        some = choose(Sums(launch_router(x[first:last], weight), None), 3, False)
        assert torch.equal(some.ids_TS, every.ids_TS[first:last])
        assert torch.equal(some.weights_TS, every.weights_TS[first:last])
