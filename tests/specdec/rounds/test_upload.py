"""Host numbers reach the device as they were when they were given, however far it is behind.

State rows of requests that start: the kernel as its twin, and what stays as it was.
"""

from unittest import mock

import numpy as np
import pytest
import torch

from specdec.requests.params import SamplingStart
from specdec.rounds import upload as module
from specdec.rounds.state import RequestState
from specdec.rounds.upload import (
    RowStart,
    Staging,
    launch_start_rows,
    start_rows,
    start_rows_ref,
    upload,
    upload_all,
)
from specdec.sizes import MAX_STOP_IDS, chain

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
M = 300  # places in the block table: more than a program writes at once
SCRATCH = 999
SAMPLED = SamplingStart(
    temperature=0.7, top_p=0.9, min_p=0.1, top_k=5, seed=2**64 - 3, repetition_penalty=1.5
)
STARTS = [
    (4, RowStart(blocks=[7], num_draft_tokens=3)),
    (0, RowStart(blocks=range(290), num_draft_tokens=0, min_position=9, stop_ids=[8, 5])),
    (2, RowStart(blocks=[1, 2], num_draft_tokens=1, sampling=SAMPLED)),
]
GROWN = [(1, place, 1000 + place) for place in range(200)] + [(5, 0, 77)]


class Stream:
    """Notes when its events are recorded and waited for."""

    def __init__(self, log):
        self.log = log
        self.count = 0

    def record_event(self):
        self.count += 1
        return mock.Mock(synchronize=lambda name=self.count: self.log.append(name))


def test_a_half_is_written_again_after_the_copies_from_it_are_over():
    waits = []
    halves = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    staging = Staging(torch.device("cuda"), halves)
    with mock.patch("torch.cuda.current_stream", return_value=Stream(waits)):
        puts = [staging.put(torch.full((3,), i)) for i in range(4)]  # 24 bytes take 32
        assert [put.tolist() for put in puts] == [[i] * 3 for i in range(4)]
        assert waits == []  # nothing was copied from the second half before
        one, other = (half.data_ptr() for half in halves)
        assert [put.data_ptr() for put in puts] == [one, one + 32, other, other + 32]
        assert staging.put(torch.tensor([7.5])).data_ptr() == one
        assert waits == [1]  # recorded when the first half was full
        staging.put(torch.zeros(8, dtype=torch.int64))
        assert waits == [1, 2]


def test_values_of_any_layout_and_none_are_staged():
    halves = torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    staging = Staging(torch.device("cuda"), halves)
    with mock.patch("torch.cuda.current_stream", return_value=Stream([])):
        turned = torch.arange(6).view(2, 3).T
        assert torch.equal(staging.put(turned), turned)
        assert staging.put(torch.empty(0, dtype=torch.int64)).shape == (0,)
        bits = torch.tensor([[1, 2]], dtype=torch.int32)
        assert torch.equal(staging.put(bits), bits)


@pytest.mark.gpu
def test_a_device_that_is_behind_gets_what_was_given():
    device = torch.device("cuda")
    rows = torch.zeros(600, 1024, dtype=torch.int64, device=device)
    torch.cuda._sleep(200_000_000)  # a tenth of a second
    for i in range(0, 600, 2):  # 16 KiB each: the halves take turns several times
        upload(rows[i], np.arange(i, i + 1024))
        values = np.arange(i + 1, i + 1025)
        upload_all([(rows[i + 1, :1000], values[:1000]), (rows[i + 1, 1000:], values[1000:])])
    expected = torch.arange(600)[:, None] + torch.arange(1024)
    assert torch.equal(rows.cpu(), expected)


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def make_state(device):
    """With a number of its own in every place."""
    state = RequestState(6, chain(3), M, SCRATCH, device, vocab_size=20, has_probs=True)
    for tensor in written(state).values():
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 10_000)
    return state


def written(state):
    names = ("num_draft_tokens", "min_positions", "num_computed_tokens", "num_nodes")
    of_sampling = {"floats": state.sampling.floats, "integers": state.sampling.integers}
    tensors = {name: getattr(state, name) for name in (*names, "stop_ids", "block_table")}
    return tensors | of_sampling


@pytest.mark.parametrize("starts, grown", [(STARTS, GROWN), (STARTS, ()), ((), GROWN)])
def test_the_kernel_writes_what_its_twin_writes(device, monkeypatch, starts, grown):
    ours, theirs = make_state(device), make_state(device)
    for state, write in ((ours, launch_start_rows), (theirs, start_rows_ref)):
        monkeypatch.setattr(module, "pick", lambda *_, write=write: write)
        start_rows(state, starts, grown)
    for name, tensor in written(ours).items():
        assert torch.equal(tensor, written(theirs)[name]), name


def test_rows_have_what_was_given_and_others_stay():
    state, before = make_state(torch.device("cpu")), written(make_state(torch.device("cpu")))
    start_rows(state, STARTS, GROWN)
    now = written(state)
    for name, tensor in now.items():
        others = [3, 6] if name == "block_table" else [1, 3, 5, 6]
        assert torch.equal(tensor[others], before[name][others]), name
    assert state.num_draft_tokens[[4, 0, 2]].tolist() == [3, 0, 1]
    assert state.min_positions[[4, 0, 2]].tolist() == [0, 9, 0]
    assert state.num_computed_tokens[[4, 0, 2]].tolist() == [0, 0, 0]
    assert state.num_nodes[[4, 0, 2]].tolist() == [0, 0, 0]
    assert state.stop_ids[0].tolist() == [8, 5] + [8] * (MAX_STOP_IDS - 2)
    assert state.block_table[4].tolist() == [7] + [SCRATCH] * (M - 1)
    assert state.block_table[0].tolist() == [*range(290)] + [SCRATCH] * (M - 290)
    assert state.block_table[1].tolist()[:201] == [*range(1000, 1200), 10_000 + M + 200]
    assert state.block_table[5, 0] == 77
    floats = [0.7, np.log(0.1), 0.9, 0.0, 0.0, 1.5]
    assert torch.equal(state.sampling.floats[2], torch.tensor(floats, dtype=torch.float32))
    assert state.sampling.integers[2].tolist() == [2**32 - 3, 2**32 - 1, 5, 0]


def test_nothing_is_launched_for_nothing(monkeypatch):
    monkeypatch.setattr(module, "uploaded", lambda *_: pytest.fail("a copy of nothing"))
    start_rows(make_state(torch.device("cpu")), [])
