"""Attention in the suite exactness, on a CPU; and that no yardstick is the shipped kernel."""

import json
import shlex
import sys
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F

from specdec.bench import attention as suite
from specdec.bench.attention import Job, LayerShape
from specdec.bench.bench import Bench, BenchOptions
from specdec.bench.pair import load_pair
from specdec.bench.yardsticks import flash_packed, yardsticks
from specdec.cli import main
from specdec.kernels.attention import launch, twin
from specdec.kernels.attention.launch import paged_attention
from specdec.kernels.attention.query_rows import QueryRows, plan_tiles

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def pair():
    return load_pair("demo", "demo", "cpu", "auto")


@pytest.fixture
def bench(pair):
    return Bench(pair, 1e12, BenchOptions(max_model_len=192))


@pytest.fixture
def no_kernels(monkeypatch):
    """Any function of specdec.kernels raises."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a kernel of ours was called")

    for name, module in list(sys.modules.items()):
        if name.startswith("specdec.kernels"):
            for each, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value.__module__ == name:
                    monkeypatch.setattr(module, each, fail)


def queries(device, Q, L, H=4, G=2, C=64):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return (
        torch.randn(2, heads, length, C, device=device, dtype=dtype)
        for heads, length in ((H, Q), (G, L), (G, L))
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("Q, L", [(1, 200), (4, 300), (66, 66)])
def test_each_yardstick_computes_the_same_without_our_kernels(device, Q, L, no_kernels):
    torch.manual_seed(0)
    q, k, v = queries(device, Q, L)
    mask = torch.ones(Q, L, dtype=torch.bool, device=device).tril(L - Q)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    found = yardsticks(torch.device(device))
    unable = {}
    for name, yardstick in found.items():
        try:
            last = yardstick(q, k)(q, k, v)[:, :, -1]
        except RuntimeError as error:  # a shape that this kernel does not take
            unable[name] = str(error)
        else:
            torch.testing.assert_close(last, expected[:, :, -1], rtol=2e-2, atol=2e-2)
    print(unable)
    assert len(unable) <= (0 if device == "cpu" else 2), unable
    assert set(found) >= ({"math", "flex"} if device == "cpu" else {"flash", "cudnn", "flex"})


def test_packed_rows_are_for_rounds():
    q, k, _ = queries("cpu", 66, 66)
    with pytest.raises(RuntimeError, match="a prompt needs a mask"):
        flash_packed(q, k)


def test_a_yardstick_that_is_our_kernel_is_caught(no_kernels):
    """What the test above would say of one that calls paged_attention."""
    with pytest.raises(AssertionError, match="a kernel of ours"):
        launch.paged_attention(*queries("cpu", 1, 64), None)
    with pytest.raises(AssertionError, match="a kernel of ours"):
        twin.paged_attention_ref(*queries("cpu", 1, 64), None)


def test_rounds_and_prompts_have_rows(bench):
    rows = list(suite.attention(bench))

    assert {(row["batch"], row["rows"], row["context"]) for row in rows[:8]} == {
        (batch, count, context) for batch in (1, 2) for count in (1, 3) for context in (70, 130)
    }
    assert [(row["what"], row["rows"]) for row in rows[8:]] == [("prompt", 66)]
    for row in rows:
        assert row["errors"] is None
        assert row["yardstick_ms"] == min(row["math_ms"], row["flex_ms"])
        assert row["against_yardstick"] == row["ms_per_layer"] / row["yardstick_ms"]
        assert row["of_bandwidth"] == pytest.approx(row["gb_per_s"] / 1000)


def test_a_wrong_yardstick_has_an_error_in_place_of_a_time(bench, monkeypatch):
    wrong = {"wrong": lambda q, k: lambda q, k, v: torch.zeros_like(q)}
    monkeypatch.setattr(suite, "yardsticks", lambda device: wrong)
    row = suite.compared(bench, Job(batch=1, rows=2, context=70))
    assert row["errors"] == "wrong: differs from ours by 100.0% of the largest value"
    assert (row["yardstick"], row["yardstick_ms"], row["wrong_ms"]) == (None, None, None)


def test_what_does_not_fit_is_said_and_left_out(bench, monkeypatch):
    def compared(_, job):
        if job.batch > 1 or job.rows > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"batch": job.batch, "rows": job.rows}

    monkeypatch.setattr(suite, "compared", compared)
    assert list(suite.attention(bench)) == [{"batch": 1, "rows": 1}] * 2
    assert (
        "attention: batch 2, 3 rows, context 130: more keys than fit into memory" in bench.skipped
    )


def test_a_gpu_reads_more_copies_of_a_round_than_its_caches_hold(bench, monkeypatch):
    layer = LayerShape(bench.pair)
    size = layer.bytes_of(Job(batch=64, rows=1, context=32768))
    assert size == 2 * 64 * 32768 * layer.G * layer.C * layer.dtype.itemsize
    monkeypatch.setattr(suite, "CACHES", 3 * layer.bytes_of(Job(batch=1, rows=1, context=70)) - 1)
    monkeypatch.setattr(LayerShape, "random", lambda self, *shape: torch.zeros(*shape, self.C))
    layer.device = torch.device("cuda")
    jobs = [Job(batch=1, rows=rows, context=70) for rows in (1, 70)]
    assert [len(layer.caches_of(job)) for job in jobs] == [3, 1]


def test_both_kernels_and_yardsticks_see_the_same_keys(bench):
    """Paged in random order and contiguous: the reference over one equals ours over the other."""
    layer = LayerShape(bench.pair)
    job = Job(batch=2, rows=1, context=100)
    [cache] = layer.caches_of(job)
    blocks = torch.tensor([[2, 0], [3, 1]])
    k, _ = suite.contiguous(cache, blocks, 100)
    assert torch.equal(k[1, :, 70], cache[0, 1, :, 6])
    assert k.shape == (2, layer.G, 100, layer.C)
    rows = suite.query_rows(layer, job, blocks, 192)
    assert isinstance(rows, QueryRows)
    q = layer.random(2, layer.H)
    out = torch.empty_like(q)
    paged_attention(q, out, cache, rows)
    assert torch.equal(rows.tiles.rows, plan_tiles([1, 1], 2, CPU).rows)
    assert not out.isnan().any()


def test_the_command_writes_it_beside_its_command(capsys, tmp_path):
    file = tmp_path / "run.json"
    given = ["bench", "--suite", "exactness", "--json", str(file), "--device", "cpu"]
    with pytest.raises(SystemExit, match="0"):
        main(given)
    result = json.loads(file.read_text())
    assert result["command"] == shlex.join(["specdec", *given])
    assert result["suites"]["exactness"][-1]["what"] == "prompt"
    assert "against yardstick" in capsys.readouterr().out
