"""The experts' MLPs: each row's experts alone, the twin, and bits that no neighbour changes."""

import pytest
import torch
import torch.nn.functional as F

from graphs.modes import BatchDescriptor
from graphs.tape.backend import TapeBackend
from graphs.wrapper import capture_graph
from specdec.kernels.experts.mlp import expert_parts_ref, experts_mlp
from specdec.kernels.experts.route import route
from specdec.kernels.experts.router import router_logits
from specdec.kernels.linear import Sums
from specdec.kernels.norms import add, add_ref, add_rms_norm, add_rms_norm_ref
from tests.specdec.kernels.by_kernel import by_kernel
from tests.specdec.kernels.expert_cases import choices, experts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [(8, 1), (12, 3), (64, 2), (128, 8)]  # E, k


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return request.param


def one_by_one(x, ids, gate_up, down):
    """Each row and slot alone, in float64; 0 for no expert."""
    parts = torch.zeros(ids.shape[1], *x.shape, dtype=torch.float64, device=x.device)
    for t, row in enumerate(ids.tolist()):
        for s, e in enumerate(row):
            if e < gate_up.num_experts:
                gate, up = (gate_up.data[e].double() @ x[t].double()).chunk(2)
                parts[s, t] = down.data[e].double() @ (F.silu(gate) * up).to(x.dtype).double()
    return parts


@pytest.mark.parametrize("E, k", SIZES)
def test_the_twin_applies_each_rows_experts(E, k):
    torch.manual_seed(0)
    weights = experts(E, 40, 24, "cpu")
    for T in (1, 5, 70):
        x, ids = torch.randn(T, 40), choices(T, E, k, "cpu")
        ids[::4] = E
        torch.testing.assert_close(
            expert_parts_ref(x, ids, *weights).double(),
            one_by_one(x, ids, *weights),
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_of_the_twin_has_the_same_bits_among_any_rows(dtype):
    torch.manual_seed(0)
    weights = experts(12, 72, 40, "cpu", dtype)
    x, ids = torch.randn(90, 72).to(dtype), choices(90, 12, 3, "cpu")
    every = expert_parts_ref(x, ids, *weights)
    for first, last in ((0, 1), (7, 8), (3, 20), (20, 90)):
        some = expert_parts_ref(x[first:last], ids[first:last], *weights)
        assert torch.equal(some, every[:, first:last])
    ids[1:] = ids[0]  # all rows to the same experts
    assert torch.equal(expert_parts_ref(x, ids, *weights)[:, 0], every[:, 0])


def test_the_sum_has_the_routers_weights():
    torch.manual_seed(0)
    weights = experts(8, 40, 24, "cpu")
    x, ids, shares = torch.randn(5, 40), choices(5, 8, 2, "cpu"), torch.rand(5, 2)
    sums = experts_mlp(x, ids, shares, *weights)
    parts = one_by_one(x, ids, *weights)
    expected = (parts * shares.double().T[..., None]).sum(0).float()
    torch.testing.assert_close(sums.finish(torch.float32), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("k, T, D", [(1, 1, 64), (2, 17, 100), (8, 3, 33)])
def test_norms_add_weighted_parts(device, dtype, k, T, D):
    """A part of weight 0 may be anything."""
    parts = torch.randn(k, T, D, device=device).to(dtype)
    weights = torch.rand(T, k, device=device)
    weights[T // 2] = 0
    parts[:, T // 2] = float("nan")
    x = Sums(parts, None, weights)
    residual = torch.randn(T, D, device=device).to(dtype)
    w = torch.randn(D, device=device).to(dtype)
    tolerance = (
        {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2} | {"atol": 2e-2}
    )
    tap, tap_ref = torch.zeros_like(residual), torch.zeros_like(residual)
    found = by_kernel(add_rms_norm)(x, residual, w, 1e-5, tap)
    expected = add_rms_norm_ref(x, residual, w, 1e-5, tap_ref)
    for a, b in zip((*found, tap), (*expected, tap_ref), strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    assert torch.equal(tap, found[1])
    assert torch.equal(tap[T // 2], residual[T // 2])
    out, out_ref = torch.zeros_like(residual), torch.zeros_like(residual)
    by_kernel(add)(x, residual, out)
    add_ref(x, residual, out_ref)
    torch.testing.assert_close(out, out_ref, **tolerance)


def test_weighted_parts_are_added_in_the_order_of_slots(device):
    """2^24 + 1 is 2^24 in float32, so that another order gives another sum."""
    parts = torch.tensor([2.0**24, 1, -(2.0**24), 1], device=device)[:, None, None]
    x = Sums(parts.repeat(1, 2, 16), None, torch.ones(2, 4, device=device))
    out = torch.zeros(2, 16, device=device)
    by_kernel(add)(x, torch.zeros_like(out), out)
    assert (out == 1).all()
    assert (x.finish(torch.float32) == 1).all()


@pytest.mark.parametrize("k, T, D", [(1, 1, 64), (3, 17, 100)])
def test_norms_find_parts_at_their_places(device, k, T, D):
    """Among those of two GPUs, NaN where nobody looks."""
    parts = torch.randn(k, T, D, device=device)
    weights = torch.rand(T, k, device=device)
    owner = torch.randint(2, (T, k), device=device, dtype=torch.int32)
    slot, row = torch.arange(k, device=device), torch.arange(T, device=device)
    places = (owner * k + slot).int()
    both = torch.full((2 * k, T, D), torch.nan, device=device)
    both[places.T.long(), row] = parts
    residual, w = torch.randn(T, D, device=device), torch.randn(D, device=device)
    x, placed = Sums(parts, None, weights), Sums(both, None, weights, places_TS=places)
    for read in (by_kernel(add_rms_norm), add_rms_norm_ref):
        pairs = zip(read(placed, residual, w, 1e-5), read(x, residual, w, 1e-5), strict=True)
        assert all(torch.equal(found, expected) for found, expected in pairs)
    out, expected = torch.zeros_like(residual), torch.zeros_like(residual)
    by_kernel(add)(placed, residual, out)
    by_kernel(add)(x, residual, expected)
    assert torch.equal(out, expected)


def test_a_tape_replays_a_layer_with_other_choices():
    """The twins have fixed shapes: nothing that was chosen at capture is chosen again."""
    torch.manual_seed(0)
    weights, router = experts(12, 40, 24, "cpu"), torch.randn(12, 40)
    x, slots = torch.randn(9, 40), torch.arange(9)

    def layer():
        ids, shares, _ = route(router_logits(x, router), 3, True, slots)
        return experts_mlp(x, ids, shares, *weights).finish(torch.float32)

    with torch.inference_mode():
        graph, out = capture_graph(TapeBackend().new_pool(), BatchDescriptor(9), layer)
        for num_padded in (0, 4, 9):
            x.normal_()
            slots[9 - num_padded :] = -1
            graph.replay()
            assert torch.equal(out, layer())
            assert (out[9 - num_padded :] == 0).all()
