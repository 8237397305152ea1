"""Parts of a graph that a replay leaves out."""

import shutil
import subprocess
from contextlib import nullcontext
from ctypes import c_void_p, sizeof
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphs import cuda_parts
from graphs.conditional import run_if
from graphs.cuda_parts import SET_CONDITION, KernelNode, NodeParams
from graphs.errors import CaptureError
from graphs.modes import BatchDescriptor
from graphs.protocol import Part
from graphs.wrapper import capture_graph


@pytest.fixture
def case(backend, device):
    """The graph of x += 1; if count: x *= 10; x += 2; if other: x *= 100; its tensors."""
    x = torch.zeros(3, device=device)
    counts = torch.zeros(2, 1, dtype=torch.int64, device=device)
    found = []

    def forward():
        x.add_(1)
        run_if(counts[0], lambda: made(x, 10))
        x.add_(2)
        run_if(counts[1], lambda: made(x, 100))

    def made(x, factor):
        found.append(factor)
        x.copy_(x * factor)  # with memory of the part's own

    forward()
    assert x.tolist() == [(10 + 2) * 100] * 3  # plainly, whatever the counts are
    x.zero_()
    with backend.side_stream():
        graph, _ = capture_graph(backend.new_pool(), BatchDescriptor(1), forward)
    assert found == [10, 100] * 2
    return graph, x, counts


@pytest.mark.parametrize("first, second", [(0, 0), (1, 0), (0, -3), (7, 1)])
def test_a_part_is_replayed_where_its_count_is_not_zero(case, first, second):
    graph, x, counts = case
    assert x.tolist() == [0] * 3
    for _ in range(2):
        counts[0], counts[1] = first, second
        x.zero_()
        graph.replay()
        expected = 10 if first else 1
        assert x.tolist() == [(expected + 2) * (100 if second else 1)] * 3
    graph.reset()


def test_a_part_may_decide_whether_the_next_one_runs(backend, device):
    count = torch.zeros(1, dtype=torch.int64, device=device)
    x = torch.zeros(1, device=device)

    def step():
        x.add_(1)
        count.sub_(1)

    def forward():
        for _ in range(4):
            run_if(count, step)

    with backend.side_stream():
        graph, _ = capture_graph(backend.new_pool(), BatchDescriptor(1), forward)
    for wanted in (0, 2, 4, 1):
        count.fill_(wanted)
        x.zero_()
        graph.replay()
        assert x.item() == wanted


def test_parts_in_parts_are_called_plainly(backend, device):
    x = torch.zeros(1, device=device)
    count = torch.ones(1, dtype=torch.int64, device=device)
    never = torch.zeros(1, dtype=torch.int64, device=device)

    def forward():
        run_if(count, lambda: run_if(never, lambda: x.add_(1)))

    with backend.side_stream():
        graph, _ = capture_graph(backend.new_pool(), BatchDescriptor(1), forward)
    graph.replay()
    assert x.item() == 1


def test_an_error_in_a_part_ends_the_capture(backend, device):
    count = torch.ones(1, dtype=torch.int64, device=device)
    x = torch.zeros(1, device=device)
    pool = backend.new_pool()

    def fail():
        x.item()

    def forward(part):
        x.add_(1)
        run_if(count, part)

    with backend.side_stream():
        with pytest.raises((CaptureError, RuntimeError)):
            capture_graph(pool, BatchDescriptor(1), lambda: forward(fail))
        run_if(count, lambda: None)  # nothing records
        graph, _ = capture_graph(pool, BatchDescriptor(1), lambda: forward(lambda: x.mul_(4)))
    x.zero_()
    graph.replay()
    assert x.item() == 4


class Driver:
    """Writes down the calls, and answers as the driver would."""

    def __init__(self, failing=""):
        self.calls, self._failing, self._handles = [], failing, iter(range(100, 200))

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == self._failing:
                return 801
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_NOT_SUPPORTED"
            elif name == "cuGraphAddNode_v2":
                params = arguments[5]._obj.any.conditional
                assert params.size == 1
                assert params.handle >= 100
                params.bodies = (c_void_p * 1)(77)
            if name not in ("cuGraphLaunch", "cuGetErrorName") and hasattr(arguments[0], "_obj"):
                arguments[0]._obj.value = next(self._handles)
            return 0

        return call


@pytest.fixture
def parts(monkeypatch):
    """parts(driver): a part, one with a count, and another one."""

    def build(driver):
        monkeypatch.setattr(cuda_parts, "_driver", lambda: driver)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        monkeypatch.setattr(cuda_parts, "_setter", lambda context: 5)
        count = torch.zeros(1, dtype=torch.int64)
        graphs = [SimpleNamespace(raw_cuda_graph=lambda: 9, reset=list) for _ in range(3)]
        with_counts = zip(graphs, (None, count, None), strict=True)
        return cuda_parts.CudaParts([Part(*each) for each in with_counts], torch.device("cpu"))

    return build


def test_parts_are_joined_by_the_calls_of_the_driver(parts):
    driver = Driver()
    parts(driver).reset()
    assert [call for call in driver.calls if call != "cuCtxGetCurrent"] == [
        "cuGraphCreate",
        "cuGraphAddChildGraphNode",
        "cuGraphConditionalHandleCreate",
        "cuGraphAddKernelNode_v2",
        "cuGraphAddNode_v2",
        "cuGraphAddChildGraphNode",
        "cuGraphAddChildGraphNode",
        "cuGraphInstantiateWithFlags",
        "cuGraphExecDestroy",
        "cuGraphDestroy",
    ]


def test_a_call_that_fails_is_named(parts):
    wanted = "cuGraphConditionalHandleCreate failed with CUDA_ERROR_NOT_SUPPORTED .801."
    with pytest.raises(CaptureError, match=wanted):
        parts(Driver("cuGraphConditionalHandleCreate"))


def test_structures_have_the_sizes_of_the_driver():
    assert (sizeof(NodeParams), sizeof(KernelNode)) == (256, 72)


def test_the_kernel_assembles(tmp_path):
    triton = find_spec("triton")
    bundled = Path(triton.origin).parent / "backends/nvidia/bin/ptxas" if triton else Path()
    ptxas = str(bundled) if bundled.is_file() else shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas")
    source = tmp_path / "set_condition.ptx"
    source.write_text(SET_CONDITION)
    # the driver resolves the call as it loads the module
    command = [ptxas, "--compile-only", "-arch=sm_90", str(source), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
