"""A kernel that is launched for each layer is looked for once, and launched where its caller is."""

from types import SimpleNamespace

import torch

from specdec.kernels import repeated
from specdec.kernels.repeated import Repeated


def test_it_is_looked_for_once_and_gets_addresses_on_the_stream_of_each_call(monkeypatch):
    streams, launched, looked_for = [7, 8], [], []
    monkeypatch.setattr(repeated, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    stream_of = lambda device: (device, streams.pop(0))  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream_of, raising=False)
    compiled = SimpleNamespace(
        run=lambda *given: launched.append(given), function="f", packed_metadata="m"
    )

    class Kernel:
        def run(self, *given, grid, warmup, **options):
            looked_for.append((given, grid, warmup, options))
            return compiled

    shared, first, second = (torch.zeros(4) for _ in range(3))
    kernel = Repeated(
        Kernel(), (2, 3, 1), then=(shared, 5, None), constants={"H": 32}, options={"num_warps": 4}
    )
    kernel(first)
    kernel(second)

    [(given, grid, warmup, options)] = looked_for
    assert given == (first, shared, 5, None)
    assert (grid, warmup, options) == ((2, 3, 1), True, {"H": 32, "num_warps": 4})
    rest = shared.data_ptr(), 5, None, 32
    assert launched == [
        (2, 3, 1, (3, stream), "f", "m", None, None, None, each.data_ptr(), *rest)
        for stream, each in ((7, first), (8, second))
    ]
