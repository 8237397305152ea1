"""The suite drafts: what drafts take in rounds, and an oracle in place of what they propose."""

import math
from dataclasses import replace

import pytest
import torch

from specdec.bench.bench import Bench
from specdec.bench.charts import PARTS, draw_charts
from specdec.bench.drafts import drafts
from specdec.bench.options import BenchOptions
from specdec.bench.oracle import oracle, spoiled
from specdec.bench.pair import Pair, load_pair
from specdec.bench.serving import Outputs, generate, greedy, serve
from specdec.config import EngineConfig
from specdec.requests.tokenizer import Tokenizer
from specdec.start.speculation import Drafting
from specdec.step import PHASES
from tests.specdec.tiny_pair import random_draft
from tests.weights.blocks import DFLASH2, DSPARK, block_config
from tests.weights.tiny import eagle3_config, tiny_target
from weights.demo import demo_directory

RATES = (0.8, 0.6, 0.4)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def pair():
    """Tiny, of random weights."""
    target = tiny_target()
    return Pair(
        target=target,
        eagle=random_draft(eagle3_config(target)),
        tokenizer=Tokenizer(demo_directory("target")),
        prompts=[[61, 13, 88, 2 + i, *range(40 + i)] for i in range(6)],
        device=torch.device("cpu"),
        config=EngineConfig(device="cpu"),
    )


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr("specdec.bench.timing.WARMUP", 1)


def options_of(**given):
    small = {"num_prompts": 2, "max_tokens": 6, "repeats": 1, "num_rounds": 2}
    return BenchOptions(ks=(3,), max_model_len=128, **small | given)


def test_the_first_drafts_hold_with_the_given_probabilities():
    prompt, text, rates = [5, 0, 7], [7 * i % 96 for i in range(20_000)], (0.8, 0.6, 0.6, 0.1)
    tokens, draws = prompt + text, []
    for seed in (3, 4):
        table_PK = spoiled(prompt, text, rates, 96, seed)
        assert len(table_PK) == len(tokens) - 4
        assert 0 <= table_PK.min() <= table_PK.max() < 96
        held_PK = table_PK == torch.tensor(tokens)[1:].unfold(0, 4, 1)
        assert torch.equal(held_PK, held_PK.cummin(dim=1).values)  # none after one that fails
        for share, rate in zip(held_PK.double().mean(dim=0).tolist(), rates, strict=True):
            assert abs(share - rate) < 3 * math.sqrt(rate * (1 - rate) / len(held_PK))
        draws.append(held_PK)
    assert not torch.equal(*draws)


def check_rounds(pair):
    """Serve at two batches; each round accepts what its request and its position say."""
    bench = Bench(pair, 1e12, options_of(batches=(4,), max_tokens=NUM_TOKENS + 3))
    V = pair.target.config.vocab_size
    plain = generate(bench.engine(Drafting(0)), greedy(pair.prompts, NUM_TOKENS + 3))
    texts = {tuple(each.prompt_token_ids): each.token_ids for each in plain}
    engine, outputs, counts = bench.engine(Drafting(3)), Outputs(), []
    with oracle(engine, texts, RATES, seed=0):
        runs = (pair.prompts, 4), (pair.prompts[:1], 1)
        served = [serve(engine, prompts, batch, NUM_TOKENS) for prompts, batch in runs]
    served = [request for run in served for request in run.requests]
    assert outputs.difference([*plain, *served]) == {}
    for request in served:
        prompt, text = request.prompt_token_ids, texts[tuple(request.prompt_token_ids)]
        table_PK = spoiled(prompt, text, RATES, V, seed=0)
        p = len(prompt)
        for num_accepted in request.stats.num_accepted:
            following = (prompt + text)[p + 1 : p + 4]
            assert num_accepted == sum(a == b for a, b in zip(table_PK[p], following, strict=True))
            counts.append(num_accepted)
            p += num_accepted + 1
    for i, rate in enumerate(RATES):
        share = sum(count > i for count in counts) / len(counts)
        assert abs(share - rate) < 3 * math.sqrt(rate * (1 - rate) / len(counts))
    own = serve(engine, pair.prompts[:4], 4, 8).requests
    accepted = [request.stats.num_accepted for request in own]
    assert accepted != [
        held.stats.num_accepted[: len(its_own)]
        for held, its_own in zip(served, accepted, strict=False)
    ]
    pair.drop()


def test_each_round_accepts_what_its_request_and_position_say(pair):
    check_rounds(pair)


@pytest.mark.gpu
@pytest.mark.parametrize("draft", ["demo", "demo-dspark"])
def test_graphs_propose_and_an_oracle_replaces(draft):
    found = load_pair("demo", draft, "cuda", "auto")
    found.prompts = [prompt[: 9 + i] for i, prompt in enumerate(found.prompts[:6])]
    check_rounds(found)


KINDS = {
    "eagle3": None,
    "peagle": lambda target: eagle3_config(target, mask_token_id=5),
    "dflash": block_config,
    "dspark": lambda target: block_config(target, **DSPARK),
    "dflash2": lambda target: block_config(target, **DFLASH2),
}


SLOW = ("eagle3", "dflash")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS]
)
def test_drafts_of_every_kind_are_timed_and_all_held(pair, kind):
    make = KINDS[kind]
    eagle = pair.eagle if make is None else random_draft(make(pair.target))
    bench = Bench(replace(pair, eagle=eagle), 1e12, options_of(batches=(2,), oracle=(1, 1, 1)))
    bench.check_draft()
    plain, row = drafts(bench)
    assert [each["draft"] for each in (plain, row)] == ["none", kind]
    assert "oracle" not in plain
    assert plain["draft_ms"] == 0 < row["extend_ms"]
    assert row["draft_ms"] == row["extend_ms"] + row["propose_ms"]
    assert row["plain_round_ms"] == plain["device_round_ms"] > 0
    assert row["mean_acceptance_length"] == 4
    assert row["accepted_per_position"] == "1.000 1.000 1.000"
    assert list(row)[-4:] == ["oracle", "graphs", "capture_seconds", "graphs_gib"]


def test_rates_that_no_draft_can_have_are_refused(pair):
    for rates in ((0.5, 0.6), (0.5, 0.0), (1.1, 0.5), (math.nan,)):
        with pytest.raises(ValueError, match=r"^--oracle .*: give a number above 0 and at most 1"):
            BenchOptions(oracle=rates)
    for ks in ((4,), (0,)):
        options = BenchOptions(ks=ks, oracle=RATES)
        with pytest.raises(ValueError, match=f"^--oracle with K = {ks[0]}: give -k from 1 to 3"):
            Bench(pair, 1e12, options).check_draft()
    Bench(pair, 1e12, BenchOptions(ks=(3, 2), oracle=RATES)).check_draft()


def test_each_act_is_in_its_part_and_the_seed_says_which_drafts_hold(pair, monkeypatch):
    times = {name: 2.0**i for i, name in enumerate(PHASES)}
    monkeypatch.setattr("specdec.bench.drafts.time_phases", lambda *_: {**times})
    rows = []
    for seed in (1, 2):
        of_seed = replace(pair, config=EngineConfig(device="cpu", seed=seed))
        bench = Bench(of_seed, 1e12, options_of(batches=(2,), oracle=RATES, max_tokens=9))
        rows.append(list(drafts(bench))[-1])
    parts = {name: rows[0][f"{name}_ms"] for name in PARTS}
    assert parts == {
        "verify": times["forward"] + times["choose"],
        "extend": times["prefill_draft"],
        "propose": times["decode_draft"],
        "rest": sum(times[name] for name in ("fill", "commit", "record", "send")),
    }
    assert rows[0]["accepted_per_position"] != rows[1]["accepted_per_position"]


def test_an_output_that_differs_has_no_figures(pair, monkeypatch):
    monkeypatch.setattr(Outputs, "difference", lambda *_: {"refused": "differs"})
    row = list(drafts(Bench(pair, 1e12, options_of(batches=(1,)))))[-1]
    assert row["refused"] == "differs"
    assert "tokens_per_second" not in row


def test_without_a_draft_plain_decoding_is_measured(pair):
    rows = list(drafts(Bench(replace(pair, eagle=None), 1e12, options_of(batches=(2,)))))
    assert [(row["draft"], row["num_speculative_tokens"]) for row in rows] == [("none", 0)]
    assert rows[0]["tokens_per_second"] > 0
    assert rows[0]["draft_ms"] == 0


def test_a_chart_has_a_bar_for_each_kind_and_number_of_drafts(tmp_path, monkeypatch):
    figures = {"verify_ms": 4.0, "extend_ms": 0.2, "propose_ms": 0.7, "rest_ms": 0.1}
    figures |= {"tokens_per_second": 812.3, "mean_acceptance_length": 4.156}
    kinds = [("none", 0), ("dspark", 3), ("dspark", 7)]
    rows = [
        {"draft": draft, "num_speculative_tokens": K, "batch": batch, **figures}
        for batch in (1, 8)
        for draft, K in kinds
    ]
    refused = {"draft": "dspark", "num_speculative_tokens": 9, "batch": 8, "refused": "differs"}
    axes = pytest.importorskip("matplotlib.axes")
    written, named, bars = [], [], []
    for name, found in (("text", written), ("set_yticks", named), ("barh", bars)):
        note(monkeypatch, axes.Axes, name, found)
    paths = draw_charts({"drafts": [*rows, refused]}, tmp_path, "a GPU")
    assert [path.name for path in paths] == ["drafts-batch-1.png", "drafts-batch-8.png"]
    assert [text for _, _, text in written] == [" 812 tokens/s, 4.16 a round"] * 6
    assert [labels for _, labels in named] == [["dspark, K = 7", "dspark, K = 3", "plain"]] * 2
    assert [widths for _, widths, _ in bars] == [[part] * 3 for part in (4.0, 0.2, 0.7, 0.1)] * 2


def note(monkeypatch, owner, name, found):
    """Keep what a method was given."""
    real = getattr(owner, name)

    def call(self, *given, **more):
        found.append(given)
        return real(self, *given, **more)

    monkeypatch.setattr(owner, name, call)
