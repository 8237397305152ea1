"""Host numbers reach the device as they were when they were given, however far it is behind."""

from unittest import mock

import numpy as np
import pytest
import torch

from specdec.rounds.upload import Staging, upload, upload_all


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
