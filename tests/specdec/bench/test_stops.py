"""Each mechanism that ends drafts early launches what it says, and changes no draft."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from graphs.modes import CUDAGraphMode
from graphs.tape.backend import TapeBackend
from specdec.bench import stops
from specdec.bench.bench import Bench, BenchOptions
from specdec.config import GraphConfig
from tests.specdec.graph_walk import Walk, give_oracle, tiny, tiny_runner

FULL = CUDAGraphMode.FULL
K = 4
NUM_ROUNDS = 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair():
    return tiny("eagle3", CPU)


def drafting(pair, backend, threshold=0.5):
    config = GraphConfig(request_sizes=(2,), token_sizes=(16,))
    return tiny_runner(pair, K, config, backend, is_adaptive=True, confidence_threshold=threshold)


@pytest.fixture(scope="module")
def captured(pair):
    """A runner with graphs, for tests that leave it as it was but for its counters."""
    return drafting(pair, TapeBackend())


@pytest.mark.parametrize(
    "stopped_by, drafted, levels",
    [("device", K, K - 1), ("device", 1, K - 1), ("host", K, K - 1), ("host", 1, 0)],
)
def test_the_host_launches_levels_while_drafts_go_on(captured, stopped_by, drafted, levels):
    counter = captured.graphs.counters()["draft_decode"]
    counter.forget_batches()
    spread = stops.time_stops(captured, 2, stopped_by, drafted, NUM_ROUNDS)
    assert 0 < spread.low <= spread.median <= spread.high
    rounds = NUM_ROUNDS + stops.WARMUP
    assert counter.replays.get(FULL, 0) == rounds * levels
    assert captured._stops_below == 0.5


def test_both_draft_the_same(pair):
    found = []
    for by_host in (False, True):
        runner = drafting(pair, None, threshold=0.03)
        give_oracle(runner, pair)
        walk = Walk(runner, is_poisoned=False)
        walk.prefill()
        with stops.stopped_by_host(runner) if by_host else nullcontext():
            for rows in ([4, 1, 9], [9, 1], [1]):
                walk.step(rows, query_len=K + 1, shared_rows=len(rows) * (K + 1), num_levels=K)
                levels = runner.state.num_live_drafts[rows].tolist()
                drafts = runner.state.draft_tokens[rows].tolist()
                found.append((levels, [each[:n] for each, n in zip(drafts, levels, strict=True)]))
    assert found[:3] == found[3:]
    assert len({n for levels, _ in found for n in levels}) > 1


def test_the_suite_has_a_row_for_each_mechanism_and_end(pair, captured):
    options = BenchOptions(ks=(2, K), batches=(1, 2), num_rounds=NUM_ROUNDS)
    of_pair = SimpleNamespace(
        eagle=pair.eagle,
        device=torch.device("cuda"),
        config=SimpleNamespace(enforce_eager=False),
        engine=lambda spec: SimpleNamespace(runner=captured),
        drop=lambda spec: None,
    )
    rows = list(stops.stops(Bench(of_pair, None, options)))
    assert [(row["batch"], row["stopped_by"], row["drafted"]) for row in rows] == [
        (batch, by, n) for batch in (1, 2) for by in ("device", "host") for n in (K, 1)
    ]
    assert all(row["levels"] == K and row["ms"] > 0 for row in rows)
    assert list(stops.stops(Bench(of_pair, None, BenchOptions(ks=(1,))))) == []
    of_pair.device = CPU
    assert list(stops.stops(Bench(of_pair, None, options))) == []
