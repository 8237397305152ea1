"""Rows on their way to the host."""

import pytest
import torch

from specdec.rounds.send import AT_ONCE, kernel_sender, twin_sender

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH = 8


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


@pytest.mark.parametrize("sender", [kernel_sender, twin_sender])
@pytest.mark.parametrize("num_rows", [1, AT_ONCE // WIDTH, AT_ONCE // WIDTH + 1, 200])
def test_the_first_rows_are_sent_and_no_more(device, sender, num_rows):
    rows = torch.arange(200 * WIDTH, device=device).view(200, WIDTH) + 2**40
    send = sender(rows)
    places_cpu = torch.zeros(3, 201, WIDTH, dtype=torch.int64, pin_memory=device.type == "cuda")
    flat_cpu = places_cpu.view(-1)[1:]  # at odd places, too
    for place in (1, 0):
        host = flat_cpu[place * 201 * WIDTH :][: num_rows * WIDTH].view(num_rows, WIDTH)
        send(host)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(host, rows[:num_rows].cpu())
    assert places_cpu.count_nonzero() == 2 * num_rows * WIDTH
