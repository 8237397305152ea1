"""What the host reads of a step: verified nodes are the first, and live ones have probabilities."""

import pytest
import torch

from specdec.rounds.buffers import CONFIDENCE_ONE
from specdec.rounds.logprobs import RecordedLogprobs
from specdec.rounds.results import AT_ONCE, NUM_SLOTS, Results, kernel_sender, twin_sender
from specdec.sizes import TreeShape
from tests.specdec.buffer_tensors import step_buffers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUMS = 8
WIDER = TreeShape(num_levels=2, top_k=2, num_nodes=4)


def results(drafts=2, **more):
    buffers = step_buffers(torch.device("cpu"), 3, drafts, **more)
    buffers.results.fill_(-999)
    buffers.proposed_tokens.fill_(-999)
    columns = buffers.columns
    columns.sampled_tokens[:2] = torch.tensor([[5, 6, 0], [7, 0, 0]])
    columns.num_accepted[:2, 0] = torch.tensor([1, 0])
    columns.num_verified_nodes[:2, 0] = torch.tensor([2, 0])
    columns.tokens[0, :2] = torch.tensor([5, 9])
    return buffers, Results(buffers)


def sent(given):
    given.send(2, RecordedLogprobs())
    return given.latest.read()


def test_a_fixed_chain_has_no_parents_and_no_probabilities():
    buffers, given = results()
    found = sent(given)
    assert buffers.results.shape == (3, 3 + 2 + 2)
    assert found.sampled_tokens == [[5, 6, 0], [7, 0, 0]]
    assert found.num_accepted == [1, 0]
    assert found.draft_tokens == [[5, 9], []]
    assert found.draft_parents == [[], []]
    assert found.path_probs.shape == (2, 0)


def test_verified_nodes_have_parents_and_live_ones_probabilities():
    buffers, given = results(WIDER, is_adaptive=True)
    buffers.columns.parents[0, :2] = torch.tensor([0, 0])
    probs = torch.tensor([[0.5, 0.25, 2.0**-24, 0.0], [0.0] * 4])
    buffers.columns.probs[:2] = (probs * CONFIDENCE_ONE).long()
    found = sent(given)
    assert found.draft_tokens == [[5, 9], []]
    assert found.draft_parents == [[0, 0], []]
    assert found.path_probs.tolist() == probs.tolist()  # verified or not


@pytest.mark.parametrize("drafts", [2, WIDER])
def test_proposals_have_parents_which_of_chains_are_implied(drafts):
    buffers, given = results(drafts)
    given.send(2, RecordedLogprobs())
    X = buffers.proposed_tokens.shape[1]
    buffers.proposed_tokens[:2] = torch.arange(2 * X).view(2, X)
    if drafts is WIDER:
        buffers.proposed_parents[:2] = torch.tensor([[0, 1, 1, 0], [0, 1, 2, 3]])
    given.send_proposals(2)
    found = given.latest.read_proposals()
    assert found.tokens == [[*range(X)], [*range(X, 2 * X)]]
    parents = [[*each] for each in found.parents]
    assert parents == ([[0, 1, 1, 0], [0, 1, 2, 3]] if drafts is WIDER else [[0, 1], [0, 1]])


def test_results_on_their_way_are_their_own_for_as_many_steps():
    buffers, given = results()
    pending = []
    for step in range(NUM_SLOTS):
        buffers.columns.sampled_tokens[:2] = step
        given.send(2, RecordedLogprobs())
        pending.append(given.latest)
    assert [each.read().sampled_tokens[0][0] for each in pending] == list(range(NUM_SLOTS))


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


@pytest.mark.parametrize("sender", [kernel_sender, twin_sender])
@pytest.mark.parametrize("num_rows", [1, AT_ONCE // NUMS, AT_ONCE // NUMS + 1, 200])
def test_the_first_rows_are_sent_and_no_more(device, sender, num_rows):
    rows = torch.arange(200 * NUMS, device=device).view(200, NUMS) + 2**40
    send = sender(rows)
    places_cpu = torch.zeros(3, 201, NUMS, dtype=torch.int64, pin_memory=device.type == "cuda")
    flat_cpu = places_cpu.view(-1)[1:]  # at odd places, too
    for place in (1, 0):
        host = flat_cpu[place * 201 * NUMS :][: num_rows * NUMS].view(num_rows, NUMS)
        send(host)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(host, rows[:num_rows].cpu())
    assert places_cpu.count_nonzero() == 2 * num_rows * NUMS
