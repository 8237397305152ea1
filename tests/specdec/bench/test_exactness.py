"""The suite exactness: its machinery on a CPU, and that no yardstick is the shipped round."""

import pytest
import torch

from specdec.bench import exactness as suite
from specdec.bench.bench import Bench
from specdec.bench.exactness import OF_ROUNDS, SHIPPED, Job, of_chunks, of_rounds, priced, timings
from specdec.bench.options import BenchOptions
from specdec.bench.pair import Pair, load_pair
from specdec.bench.yardsticks import yardsticks
from specdec.kernels.attention.launch import paged_attention
from specdec.kernels.backend import Backend
from specdec.models import attention

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair():
    return load_pair("demo", "demo", "cpu", "auto")


@pytest.fixture
def bench(pair):
    options = BenchOptions(
        ks=(2,), batches=(1, 2), contexts=(70, 130), max_model_len=192, num_rounds=2
    )
    yield Bench(pair, 1e12, options)
    pair.drop()


@pytest.fixture
def two_yardsticks(monkeypatch):
    """One that works, and one that no shape suits. Gives (requests, rows of each, keys) by call."""
    math, shapes = yardsticks(CPU)["math"], set()

    def noted(q, k):
        shapes.add((len(q), q.shape[2], k.shape[2]))
        return math(q, k)

    def unable(q, k):
        raise RuntimeError("No available kernel.\nAborting.")

    found = {"math": noted, "unable": unable}
    monkeypatch.setattr("specdec.bench.exactness.yardsticks", lambda _: found)
    monkeypatch.setattr(suite, "yardsticks", lambda _: found)
    return shapes


def test_rounds_are_timed_with_each_exchange(bench, two_yardsticks, monkeypatch):
    contexts = []

    def noted(q_THC, out_THC, cache, rows, *how):
        contexts.append(int(rows.positions[0]))
        paged_attention(q_THC, out_THC, cache, rows, *how)

    monkeypatch.setattr(attention, "paged_attention", noted)
    rows = of_rounds(bench, 2, 2, 70)

    names = ["nothing (shipped)", "layers", "heads", "layers + heads", "math", "unable"]
    assert [row["exchanged"] for row in rows[:6]] == names
    assert rows[6]["exchanged"] in {f"{name} + math" for name in names[1:4]}
    for row in rows:
        assert (row["num_speculative_tokens"], row["batch"], row["context"]) == (2, 2, 70)
    _check_unable(rows, "device_round_ms")
    assert max(contexts) in range(70, 100)  # where the shipped rounds were
    assert two_yardsticks == {(2, 3, 70), (2, 1, 70)}


def test_chunks_are_timed_with_each_exchange(bench, two_yardsticks):
    rows = of_chunks(bench, 2, 70)

    assert [row["exchanged"] for row in rows] == [
        *("nothing (shipped)", "layers", "math", "unable", "layers + math")
    ]
    assert {row["prompt_tokens"] for row in rows} == {70}
    assert two_yardsticks == {(1, 70, 70), (1, 1, 70)}
    _check_unable(rows, "chunk_ms")


def _check_unable(rows, unit):
    """What is not possible says why; all others have times and prices, and one is the yardstick."""
    [unable] = [row for row in rows if row["exchanged"] == "unable"]
    assert unable["error"] == "No available kernel."
    assert (unable[unit], unable["price"], unable["is_yardstick"]) == (None, None, False)
    able = [row for row in rows if row is not unable]
    assert all(row["error"] is None for row in able)
    assert [row["price"] for row in able] == [rows[0][unit] / row[unit] - 1 for row in able]
    [yardstick] = [row for row in rows if row["is_yardstick"]]
    assert yardstick[unit] == min(row[unit] for row in able[1:])


def test_the_shipped_round_is_never_its_own_yardstick():
    """It is the fastest here, and so the price is negative."""
    times = {SHIPPED: 4.0, ("layers",): 5.0, ("flash",): 8.0, ("flex",): "refused"}
    rows = priced({"batch": 8}, "device_round_ms", times)

    [yardstick] = [row for row in rows if row["is_yardstick"]]
    assert (yardstick["exchanged"], yardstick["price"]) == ("layers", pytest.approx(-0.2))
    assert rows[0] == {
        "batch": 8,
        "exchanged": "nothing (shipped)",
        "device_round_ms": 4.0,
        "price": 0.0,
        "is_yardstick": False,
        "error": None,
    }
    alone = priced({}, "device_round_ms", {SHIPPED: 4.0, ("flash",): "refused"})
    assert not any(row["is_yardstick"] for row in alone)


@pytest.fixture
def timed(pair, monkeypatch):
    """timed(time, attentions): the times of rounds, by time(what is exchanged)."""

    def call(time, attentions):
        exchanged = []
        monkeypatch.setattr(suite, "yardsticks", lambda _: dict.fromkeys(attentions))
        monkeypatch.setattr(
            suite, "backend_of", lambda names, *_: exchanged.append(names) or Backend()
        )
        job = Job(batch=1, rows=1, context=70)
        return timings(lambda: time(exchanged[-1]), pair, job, OF_ROUNDS)

    return call


def test_the_best_products_meet_the_best_attention(timed):
    speeds = {"layers": 1.2, "heads": 0.9, "flash": 0.8, "cudnn": 0.7}

    def time(names):
        if "flex" in names:
            raise ValueError("refused")
        found = 4.0
        for name in names:
            found *= speeds[name]
        return found

    times = timed(time, ["flash", "cudnn", "flex"])
    assert list(times)[-2:] == [("flex",), ("heads", "cudnn")]
    assert times["flex",] == "refused"
    assert list(timed(time, ["flex"]))[-1] == ("flex",)
    rows = priced({}, "device_round_ms", times)
    assert [row["price"] for row in rows if row["is_yardstick"]] == [pytest.approx(1 / 0.63 - 1)]


def test_only_attention_may_be_refused(timed):
    def time(names):
        raise ValueError(f"{names} failed")

    with pytest.raises(ValueError, match=r"\(\) failed"):
        timed(time, ["flash"])


def test_every_k_batch_and_context_and_both_prompts_are_measured(bench, monkeypatch):
    monkeypatch.setattr(bench.pair, "device", torch.device("cuda"))
    monkeypatch.setattr(Pair, "drop", lambda _: None)
    monkeypatch.setattr(suite, "MOST_CONTEXT", 200)
    monkeypatch.setattr(suite, "PROMPTS", (100, 150, 10**6))
    monkeypatch.setattr(suite, "of_rounds", lambda _, *point: [point])
    monkeypatch.setattr(suite, "of_chunks", lambda _, *point: [point])
    rounds = [(K, *each) for K in (0, 2) for each in ((1, 70), (1, 130), (2, 70))]
    assert list(suite.exactness(bench)) == [*rounds, (2, 100), (2, 150)]
    longest = bench.pair.target.config.max_position_embeddings - 1
    assert bench.skipped == [
        *(f"exactness: K = {K}, batch 2, context 130: more than 200 tokens" for K in (0, 2)),
        f"exactness: prompt of 1000000 tokens: the target has room for {longest} tokens",
    ]
