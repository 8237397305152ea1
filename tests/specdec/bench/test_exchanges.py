"""What a round computes with in place of our kernels, on a CPU."""

from dataclasses import asdict

import pytest
import torch

from specdec import kernels
from specdec.bench.exactness import Job, backend_of, chunk_ms, cublas_tile_maxima, silu_mul
from specdec.bench.pair import EngineSpec, load_pair
from specdec.bench.timing import steady
from specdec.kernels import HAS_TRITON, best_token, gate_up, linear
from specdec.kernels.backend import Backend, backend, using
from specdec.models import layers
from specdec.rounds import propose
from specdec.scheduling.work import PromptPart
from specdec.start.speculation import Drafting

CPU = torch.device("cpu")
JOB = Job(batch=2, rows=3, context=70)  # rounds of two requests with K = 2
ROUNDS = EngineSpec(drafting=Drafting(2), max_num_seqs=2, max_model_len=128)
PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def pair():
    return load_pair("demo", "demo", "cpu", "auto")


def exchanged(names, job):
    """Let others compute in the body."""
    return using(backend_of(names, job, CPU))


class Noted:
    """A yardstick that gives twice the queries, in a layout of its own, and notes its calls."""

    def __init__(self):
        self.prepared = []
        self.calls = []

    def __call__(self, q, k):
        self.prepared.append((tuple(q.shape), tuple(k.shape)))
        return self._attend

    def _attend(self, q, k, v):
        assert k.shape == v.shape
        assert k.is_contiguous()
        assert v.is_contiguous()
        self.calls.append((tuple(q.shape), tuple(k.shape), k.data_ptr()))
        return 2 * q.contiguous()


@pytest.fixture
def noted(monkeypatch):
    """The yardstick "noted"; any attention of ours fails."""

    def shipped(*_, **__):
        raise AssertionError("the shipped attention ran")

    found = Noted()
    monkeypatch.setattr("specdec.models.attention.paged_attention", shipped)
    monkeypatch.setattr("specdec.bench.exactness.yardsticks", lambda _: {"noted": found})
    return found


def shapes(pair, B, Q, L):
    H, G, C = pair.target.config.heads
    return (B, H, Q, C), (B, G, L, C)


def test_every_attention_of_a_round_goes_through_the_yardstick(pair, noted):
    """The target's rows, then the draft's: after its prefill one of each request, as in a level."""
    layers_of_target = pair.target.config.num_layers
    with (
        exchanged(["noted"], JOB),
        steady(pair.engine(ROUNDS), PROMPTS, 2) as run_round,
    ):
        noted.calls.clear()
        run_round()
        run_round()

    of_round = [shapes(pair, 2, 3, 70)] * layers_of_target + [shapes(pair, 2, 1, 70)] * 2
    assert [call[:2] for call in noted.calls] == of_round * 2
    # memory of each layer's own, the same in all levels and rounds
    addresses = [address for _, _, address in noted.calls[: len(of_round)]]
    assert len(set(addresses)) == layers_of_target + 1
    assert [address for _, _, address in noted.calls[len(of_round) :]] == addresses
    assert len(noted.prepared) == len(set(noted.prepared))


def test_every_attention_of_a_chunk_goes_through_the_yardstick(pair, noted):
    """All rows see all tokens; the draft's last layer goes on for one, and its level has one."""
    job = Job(batch=1, rows=70, context=70)
    with exchanged(["noted"], job):
        chunk_ms(pair, 2, 70)

    num_layers = pair.target.config.num_layers
    of_chunk = [shapes(pair, 1, 70, 70)] * num_layers + [shapes(pair, 1, 1, 70)] * 2
    assert [call[:2] for call in noted.calls] == of_chunk * 8


def test_prompts_before_rounds_and_beside_them_are_not_attended(pair, noted):
    engine = pair.engine(ROUNDS)
    part = PromptPart(state_row=-1, prompt=[5, 6, 7, 8], start=0, length=4, blocks=[0])
    with exchanged(["noted"], JOB), steady(engine, PROMPTS, 2):
        # of prompts, the draft goes on for one row of each
        of_prompts = [shapes(pair, 2, 1, 70)]
        assert [call[:2] for call in noted.calls] == of_prompts * 2
        row = engine.scheduler.running[0].state_row
        engine.runner.run_step([row], [part], max_num_computed=10)
    assert [call[:2] for call in noted.calls] == of_prompts * 4


def test_the_next_product_reads_what_the_yardstick_found(pair, noted, monkeypatch):
    asked, real = [], layers.room_for

    def room_for(q_THC):
        asked.append((q_THC, real(q_THC)))
        return asked[-1][1]

    monkeypatch.setattr(layers, "room_for", room_for)
    with (
        exchanged(["noted"], JOB),
        steady(pair.engine(ROUNDS), PROMPTS, 2) as run_round,
    ):
        asked.clear()
        run_round()

    assert len(asked) == pair.target.config.num_layers + 2
    for q_THC, out_THC in asked:
        assert torch.equal(out_THC, 2 * q_THC)
        assert out_THC.is_contiguous()


def test_what_is_exchanged_is_put_back(pair, noted):
    with exchanged(["layers", "heads", "noted"], JOB):
        assert None not in asdict(backend.get()).values()
        with exchanged(["heads"], JOB):
            assert backend.get() == Backend(tile_maxima=cublas_tile_maxima)
        assert None not in asdict(backend.get()).values()
    assert backend.get() == Backend()
    with pytest.raises(ZeroDivisionError), exchanged(["layers"], JOB):
        _ = 1 / 0
    assert backend.get() == Backend()
    with pytest.raises(AssertionError, match="the shipped attention ran"):
        chunk_ms(pair, 2, 70)


def test_exchanged_products_run_no_shipped_kernel(monkeypatch):
    def shipped(*_, **__):
        raise AssertionError("a shipped kernel ran")

    seen, real = [], torch.nn.functional.linear
    monkeypatch.setattr(linear, "launch_linear", shipped)
    monkeypatch.setattr(linear, "launch_split_linear", shipped)
    monkeypatch.setattr(gate_up, "launch_gate_up", shipped)
    monkeypatch.setattr(best_token, "tiles_for", shipped)
    for module in (kernels, linear):
        monkeypatch.setattr(module, "use_triton", lambda *_: True)
    monkeypatch.setattr(
        "specdec.bench.exactness.F.linear", lambda *given: seen.append("linear") or real(*given)
    )
    monkeypatch.setattr(
        torch, "mm", lambda a, b, out_dtype: seen.append("mm") or (a @ b).to(out_dtype)
    )
    monkeypatch.setattr("specdec.bench.exactness.silu_mul", lambda x: x)
    x, weight = torch.randn(3, 16), torch.randn(512, 16)
    with exchanged(("layers", "heads"), JOB):
        torch.testing.assert_close(linear.linear(x, weight), x @ weight.t())
        torch.testing.assert_close(
            linear.split_linear(x, weight, None).finish(torch.float32), x @ weight.t()
        )
        torch.testing.assert_close(gate_up.gate_up(x, weight, None), x @ weight.t())
        for module in (best_token, propose):
            values_PT, ids_PT = module.launch_tile_maxima(x, weight)[:2]
            assert (
                ids_PT.gather(0, values_PT.argmax(dim=0)[None])[0].tolist()
                == (x @ weight.t()).argmax(dim=1).tolist()
            )

    assert seen == ["linear", "mm", *["linear"] * 3]
    for call in (linear.linear, linear.split_linear, gate_up.gate_up, propose.launch_tile_maxima):
        with pytest.raises(AssertionError, match="a shipped kernel ran"):
            call(x, weight)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton or its interpreter")
def test_silu_mul_is_the_second_half_of_swiglu():
    x = torch.randn(3, 2 * 1500)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(silu_mul(x), torch.nn.functional.silu(gate) * up)
