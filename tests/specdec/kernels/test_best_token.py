"""Which id a row gets at the edges of the vocabulary, a tile, min_tokens and a floor, by both."""

import copy

import pytest
import torch

from specdec.kernels import best_token as best_token_file
from specdec.kernels.best_children import Perturbation
from specdec.kernels.best_token import (
    StopMask,
    best_token,
    best_token_ref,
    launch_tile_maxima,
)
from specdec.kernels.choose_token import NoiseKeys, choose_token_ref, launch_choices, launch_write
from specdec.kernels.gumbel import DRAFT
from specdec.kernels.sum_order import Order
from specdec.kernels.tile_shapes import Shape
from specdec.kernels.tiles import cut
from specdec.rounds.propose import write_level, write_level_ref
from specdec.rounds.state import RequestState
from specdec.rounds.upload import RowStart, start_rows
from specdec.sizes import MAX_STOP_IDS, chain
from tests.specdec.buffer_tensors import step_buffers
from tests.specdec.kernels.by_kernel import by_kernel
from tests.specdec.rounds.levels import level_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
V, D = 200, 64


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def best_by_kernel(x, weight, mask=None, factor=1.0):
    """Into a column of something wider."""
    out = torch.full((len(x), 3), -999, device=x.device)
    by_kernel(best_token)(x, weight, out[:, 1], mask, factor)
    assert (out[:, ::2] == -999).all()
    return out[:, 1]


def chosen_by_kernel(logits, floor, noise_keys):
    out = torch.full((len(logits), 3), -999, device=logits.device)
    launch_write(*launch_choices(logits, floor, noise_keys)[:2], out[:, 1])
    assert (out[:, ::2] == -999).all()
    return out[:, 1]


def noise_keys_of(num_rows, device, **changes):
    values = {
        "temperatures": torch.full((num_rows,), 0.7, device=device),
        "seeds": torch.randint(0, 2**32, (num_rows, 2), device=device),
        "positions": torch.arange(num_rows, device=device),
        "epochs": torch.zeros(num_rows, dtype=torch.int64, device=device),
        "stream": DRAFT,
    }
    return NoiseKeys(**values | changes)


@pytest.mark.parametrize("rows", [1, 50])
def test_logits_that_a_factor_makes_equal_are_equal(device, rows):
    """Whoever reads all logits times the factor sees the tie, too."""
    factor = 1.1 / 8
    low = torch.linspace(1.9, 1.95, 100, device=device)
    high = torch.nextafter(low, torch.full_like(low, 2))
    is_tie = low * factor == high * factor
    low, high = low[is_tie][0], high[is_tie][0]
    x = torch.eye(1, D, device=device).expand(rows, D).contiguous()
    weight = torch.zeros(V, D, device=device)
    weight[3], weight[150] = low, high
    for expected, of in ((150, 1.0), (3, factor)):
        assert (best_by_kernel(x, weight, factor=of) == expected).all()
        assert (best_token_ref(x, weight, factor=of) == expected).all()


@pytest.mark.parametrize("rows", [1, 33, 48, 70, 97])
def test_every_row_of_a_tile_with_a_tail_gets_its_id_and_its_share(device, rows, monkeypatch):
    tiles = cut(Shape(64, 48, 64, 2, 4), 64, Order(1, 1))
    monkeypatch.setattr(best_token_file, "tiles_for", lambda *_: tiles)
    x, weight = torch.randn(rows, D, device=device), torch.randn(V, D, device=device)
    mask = StopMask(
        positions=torch.arange(rows, device=device),
        states=torch.zeros(rows, dtype=torch.int64, device=device),
        min_positions=torch.full((2,), 40, device=device),
        stop_ids=torch.tensor([[3, 70], [0, 0]], device=device),
    )
    assert torch.equal(best_by_kernel(x, weight, mask), best_token_ref(x, weight, mask))
    maxima = launch_tile_maxima(x, weight, None, has_sums=True)
    scores = x @ weight.T
    top = scores.max(dim=1).values
    sums = (maxima.sums * (maxima.best - top).exp()).sum(dim=0)
    torch.testing.assert_close(sums, (scores - top[:, None]).exp().sum(dim=1), rtol=1e-2, atol=0)


@pytest.mark.parametrize("num_ids", [1, 63, 65, V])
def test_what_lies_behind_the_vocabulary_is_no_token_though_all_logits_are_negative(
    device, num_ids
):
    x, weight = torch.rand(5, D, device=device), -torch.rand(num_ids, D, device=device)
    assert torch.equal(best_by_kernel(x, weight), best_token_ref(x, weight))


@pytest.mark.parametrize("distance", [1, 2, 100])
def test_of_equal_logits_the_lower_id_wins_within_a_tile_and_beyond(device, distance):
    # whole numbers: their sums are exact in any order, on any machine
    x, weight = (torch.randint(-9, 10, (n, D), device=device).float() for n in (40, V))
    weight[distance:] = weight[:-distance].clone()
    weight[distance : 2 * distance] = weight[:distance]
    ours = best_by_kernel(x, weight)
    assert torch.equal(ours, best_token_ref(x, weight))
    logits = x @ weight.T
    twins = ours + distance
    has_twin = (twins < V) & (ours < distance)
    rows = torch.arange(40, device=device)[has_twin]
    assert torch.equal(logits[rows, ours[rows]], logits[rows, twins[rows]])


@pytest.mark.parametrize("choose", [best_by_kernel, best_token_ref])
@pytest.mark.parametrize("column", [0, 1, MAX_STOP_IDS - 1])
def test_a_stop_id_is_out_below_the_min_position_and_in_from_there_on(device, choose, column):
    x, weight = torch.randn(4, D, device=device), torch.randn(V, D, device=device)
    first, second = (x @ weight.T).topk(2).indices.T
    stop_ids = torch.arange(MAX_STOP_IDS, device=device).repeat(4, 1)
    stop_ids[torch.isin(stop_ids, torch.cat([first, second]))] = V - 1
    row_B = torch.tensor([2, 1, 0, -1], device=device)
    for slot, row in enumerate([2, 1, 0, 3]):
        stop_ids[row, column] = first[slot]
    mask = StopMask(
        positions=torch.tensor([10, 10, 10, 10], device=device),
        states=row_B,
        min_positions=torch.tensor([12, 11, 12, 0], device=device),  # the drawn token is at 11
        stop_ids=stop_ids,
    )
    assert not (stop_ids[:3, 1:-1] == V - 1).all()
    assert choose(x, weight, mask).tolist() == [second[0], first[1], second[2], first[3]]


@pytest.mark.parametrize("choose", [chosen_by_kernel, choose_token_ref])
def test_a_token_that_stands_on_the_floor_is_kept(device, choose):
    logits, noise_keys = torch.randn(6, 3000, device=device), noise_keys_of(6, device)
    floor = (logits / noise_keys.temperatures[:, None]).amax(dim=1)
    assert torch.equal(choose(logits, floor, noise_keys), logits.argmax(dim=1))
    assert (choose(logits, torch.nextafter(floor, floor + 1), noise_keys) == -1).all()


def test_rows_of_a_wider_tensor_are_chosen_from_by_their_own_columns(device):
    wide, noise_keys = torch.randn(6, 3100, device=device), noise_keys_of(6, device)
    floor = torch.full((6,), -torch.inf, device=device)
    ours = chosen_by_kernel(wide[:, :3000], floor, noise_keys)
    assert torch.equal(ours, choose_token_ref(wide[:, :3000], floor, noise_keys))


@pytest.mark.parametrize("has_d2t", [False, True])
def test_a_drawn_draft_is_placed_as_the_targets_id_by_kernel_and_twin(device, has_d2t):
    K = 2
    ours = step_buffers(device, 4, K, D), RequestState(4, chain(K), 1, 9, device)
    for row in range(3):
        start_rows(ours[1], [(row, RowStart(blocks=[row], num_draft_tokens=K))])
    ours[0].sample_mapping[:3] = torch.arange(3, device=device)
    theirs = copy.deepcopy(ours)
    d2t = torch.arange(V, device=device) + 1000 if has_d2t else None
    logits, noise_keys = torch.randn(3, V, device=device), noise_keys_of(3, device, token_ids=d2t)
    floor = torch.full((3,), -torch.inf, device=device)
    for write, case in ((by_kernel(write_level), ours), (write_level_ref, theirs)):
        write(logits, level_of(*case, 0, 100, d2t_W=d2t), Perturbation(floor, noise_keys))
    id_B = choose_token_ref(logits, floor, noise_keys)
    assert ours[0].proposed_tokens[:3, 0].tolist() == (id_B + 1000 if has_d2t else id_B).tolist()
    for name in ("proposed_tokens", "draft_last_tokens", "draft_positions", "draft_slots"):
        assert torch.equal(getattr(ours[0], name)[:3], getattr(theirs[0], name)[:3]), name
