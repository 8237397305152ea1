"""A kernel that is launched for each layer is looked for once, and launched where its caller is."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from specdec.kernels import repeated, tl, triton
from specdec.kernels.repeated import Repeated


@pytest.mark.parametrize("shared_bytes, launched_with", [(0, 64), (32, 64), (48 * 1024, 48 * 1024)])
def test_it_is_looked_for_once_and_gets_addresses_on_the_stream_of_each_call(
    monkeypatch, shared_bytes, launched_with
):
    streams, launched, looked_for = [7, 8], [], []
    monkeypatch.setattr(repeated, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    stream_of = lambda device: (device, streams.pop(0))  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream_of, raising=False)
    compiled = SimpleNamespace(
        run=lambda *given: launched.append(given), function="f", packed_metadata=(4, 1, 64)
    )

    class Kernel:
        def run(self, *given, grid, warmup, **options):
            looked_for.append((given, grid, warmup, options))
            return compiled

    shared, first, second = (torch.zeros(4) for _ in range(3))
    kernel = Repeated(
        Kernel(),
        (2, 3, 1),
        then=(shared, 5, None),
        constants={"H": 32},
        options={"num_warps": 4},
        shared_bytes=shared_bytes,
    )
    kernel(first)
    kernel(second)

    [(given, grid, warmup, options)] = looked_for
    assert given == (first, shared, 5, None)
    assert (grid, warmup, options) == ((2, 3, 1), True, {"H": 32, "num_warps": 4})
    rest = shared.data_ptr(), 5, None, 32
    assert launched == [
        (2, 3, 1, (3, stream), "f", (4, 1, launched_with), None, None, None, each.data_ptr(), *rest)
        for stream, each in ((7, first), (8, second))
    ]


@triton.jit
def _now():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _when_and_where_kernel(out_ptr, ns):
    place = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    start = _now()
    now = start
    while now - start < ns:
        now = _now()
    at = out_ptr + tl.program_id(0) * 3
    tl.store(at, place.to(tl.int64))
    tl.store(at + 1, start)
    tl.store(at + 2, now)


def most_at_once(runs: list[list[int]]) -> int:
    """Programs on one multiprocessor. runs: the place, start and end of each program"""
    found, running = 0, Counter()
    changes = [(start, 1, place) for place, start, _ in runs]
    for _, change, place in sorted(changes + [(end, -1, place) for place, _, end in runs]):
        running[place] += change
        found = max(found, running[place])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("shared_bytes, least, most", [(0, 5, 32), (48 * 1024, 1, 4)])
def test_programs_that_reserve_shared_memory_are_few_on_a_multiprocessor(shared_bytes, least, most):
    out = torch.zeros(4096, 3, dtype=torch.int64, device="cuda")
    then, options = (50_000,), {"num_warps": 1}
    sizes = {"constants": {}, "shared_bytes": shared_bytes}
    Repeated(_when_and_where_kernel, (len(out), 1, 1), then=then, options=options, **sizes)(out)
    assert least <= most_at_once(out.tolist()) <= most
