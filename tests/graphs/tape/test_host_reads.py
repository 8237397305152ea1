import pytest
import torch

from graphs.modes import BatchDescriptor
from graphs.protocol import CaptureError
from graphs.wrapper import capture_graph


@pytest.mark.parametrize(
    "read, named",
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: bool(x.any()), "bool"),
        (lambda x: 1 if x[0] > 0 else 2, "bool"),
        (lambda x: int(x[0]), "int"),
        (lambda x: float(x[0]), "float"),
        (lambda x: [0, 1, 2][x[0].long()], "index"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: torch.allclose(x, x), "allclose|item|bool"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: torch.where(x > 0), "nonzero"),
        (lambda x: x[x > 0], "index.*boolean mask"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: x.index_put_((x > 0,), x[:2]), "boolean mask"),
        (lambda x: torch.unique(x), "unique"),
        (lambda x: torch.repeat_interleave(x.long()), "repeat_interleave"),
        (lambda x: torch.rand_like(x), "rand_like.*generator"),
        (lambda x: x.normal_(), "normal_.*generator"),
        (lambda x: torch.tensor([1.0], device=x.device), r"torch\.tensor"),
        (lambda x: repr(x), "repr"),
    ],
)
def test_what_no_capture_can_hold_is_named(tape, read, named):
    x = torch.ones(3)
    with pytest.raises(CaptureError, match=f"(?i){named}"):
        capture_graph(tape.new_pool(), BatchDescriptor(1), lambda: read(x))


def test_what_a_capture_can_hold_is_left_alone(tape):
    x = torch.ones(3)

    def forward():
        y = x.clone()
        y[x > 0] = 0  # torch fills, and counts nothing
        known = y.shape[0], len(y), y.data_ptr(), y.dtype, y.is_cuda
        return known, y, torch.repeat_interleave(y, 2)

    graph, (known, y, twice) = capture_graph(tape.new_pool(), BatchDescriptor(1), forward)
    assert known == (3, 3, y.data_ptr(), torch.float32, False)
    x.copy_(torch.tensor([-1.0, 2.0, -3.0]))
    graph.replay()
    assert y.tolist() == [-1, 0, -3]
    assert twice.tolist() == [-1, -1, 0, 0, -3, -3]


def test_reads_outside_a_capture_stay_possible(tape):
    x = torch.ones(3)
    graph, y = capture_graph(tape.new_pool(), BatchDescriptor(1), lambda: x + 1)
    graph.replay()
    assert y.sum().item() == 6
