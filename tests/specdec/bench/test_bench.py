"""`specdec bench` measures the same on the CPU as on a GPU, so that its code is exercised here."""

import itertools
import json
import shlex
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts import expert_search
from specdec.bench import cold as colds
from specdec.bench import experts, serving, suites
from specdec.bench import loop as loops
from specdec.bench.bench import Bench
from specdec.bench.charts import caption, draw_charts, latest
from specdec.bench.options import BenchOptions
from specdec.bench.pair import Bytes, EngineSpec, Pair, bytes_of, joined, load_pair
from specdec.bench.products import weights_of
from specdec.bench.report import percentile, table, tables
from specdec.bench.requests import draw_jobs
from specdec.bench.serving import Outputs
from specdec.bench.timing import Spread, steady, time_phases, wrapped
from specdec.cli import main
from specdec.cli.bench_choices import SUITES
from specdec.kernels.compilations import Compilations
from specdec.rounds.results import HostWaits, PendingResult
from specdec.scheduling.costs import PromptBudget, StepCosts
from specdec.scheduling.prompts import PromptRows
from specdec.sizes import TreeShape
from specdec.start.measure_costs import NEVER
from specdec.start.speculation import Drafting
from specdec.step import PHASES
from tests.weights.blocks import DFLASH2, DSPARK, block_config
from tests.weights.tiny import eagle1_config, eagle3_config
from weights.shapes import draft_shapes

TINY = shlex.split("--device cpu -k 2 --num-prompts 2 --max-tokens 8 --repeats 1 --num-rounds 2")


@pytest.fixture(scope="module")
def pair():
    """With short prompts: what is measured of them has no figures that hold for a CPU."""
    found = load_pair("demo", "demo", "cpu", "auto")
    found.prompts = [prompt[:14] for prompt in found.prompts]
    return found


@pytest.fixture
def bench(pair):
    options = BenchOptions(
        ks=(2,),
        batches=(1, 2),
        contexts=(70,),
        num_prompts=2,
        max_tokens=8,
        max_model_len=512,
        repeats=1,
        num_rounds=2,
    )
    yield Bench(pair, 1e12, options)
    pair.drop()


def test_the_command_prints_card_tables_and_one_line_of_json(capsys, tmp_path):
    file = tmp_path / "run.json"
    given = ["bench", "--suite", "protocol,rounds", "--json", str(file), *TINY]
    run(given)

    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert json.loads(file.read_text()) == result
    assert result["command"] == shlex.join(["specdec", *given])
    assert lines[0].startswith("device")
    assert [row["num_speculative_tokens"] for row in result["results"]] == [0, 2]
    assert all(row["tokens_per_second"] > 0 for row in result["results"])
    assert result["card"]["reading_gb_per_s"] > 0
    assert not any(str(Path.cwd()) in str(value) for value in result["card"].values())


def test_figures_are_refused_where_an_output_differs(capsys, monkeypatch):
    def serve_wrong(engine, *given):
        served = serving_serve(engine, *given)
        if engine.runner.sizes.num_speculative_tokens:
            served.requests[-1].token_ids[3] += 1
        return served

    serving_serve = serving.serve
    monkeypatch.setattr("specdec.bench.bench.serve", serve_wrong)
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *TINY])

    out = capsys.readouterr().out
    assert exit_info.value.code == 1
    assert "REFUSED: K = 2, batch 1: prompt 1 differs from plain decoding at token 3" in out
    results = json.loads(out.splitlines()[-1])["results"]
    [row] = [row for row in results if row["num_speculative_tokens"] == 2]
    assert "tokens_per_second" not in row


STOPPED = [(0.0, NEVER), (0.0, 0.999), (1.0, 0.2)]


@pytest.mark.slow
def test_trees_are_compared_with_chains_and_plain_decoding(bench, monkeypatch):

    def serve_wrong_drawn_trees(engine, *args):
        served = serving.serve(engine, *args)
        is_tree = engine.runner.sizes.tree is not None and engine.runner.threshold is None
        if is_tree and args[-1].temperature > 0:
            assert args[-1].seed in (None, 0, 5)  # None: to warm up
            served.requests[-1].token_ids[3] += args[-1].seed == 5
        return served

    shape = TreeShape(num_levels=3, top_k=3, num_nodes=5)
    monkeypatch.setattr("specdec.bench.suites.SHAPES", (shape,))
    monkeypatch.setattr("specdec.bench.bench.SEEDS", (0, 5))
    monkeypatch.setattr("specdec.bench.suites.TEMPERATURES", (0.0, 1.0))
    monkeypatch.setattr("specdec.bench.suites.THRESHOLDS", (NEVER, 0.999))
    monkeypatch.setattr("specdec.bench.bench.serve", serve_wrong_drawn_trees)
    bench.options = replace(bench.options, batches=(2,), max_tokens=5, repeats=1, num_prompts=2)
    rows = list(suites.trees(bench))
    names = ("temperature", "num_speculative_tokens", "rows", "top_k", "threshold")
    assert [tuple(row[name] for name in names) for row in rows] == [
        *((T, *each) for T in (0.0, 1.0) for each in ((0, 1, 1, None), (2, 3, 1, None))),
        *((T, 2, 3, 1, threshold) for T, threshold in STOPPED),
        *((T, 3, 6, 3, None) for T in (0.0, 1.0)),
        *((T, 3, 6, 3, threshold) for T, threshold in STOPPED),
    ]
    [wrong] = [row for row in rows if "refused" in row]
    assert (wrong["top_k"], wrong["temperature"]) == (3, 1.0)
    assert all(row["tokens_per_second"] > 0 for row in rows if row is not wrong)
    whole, never, always = rows[7], rows[9], rows[10]
    assert whole["mean_acceptance_length"] > 1.5
    for name in ("mean_acceptance_length", "verified", "levels"):
        assert whole[name] == never[name] >= always[name]
    assert always["verified"] < 5 == whole["verified"]


@pytest.mark.slow
def test_trees_temperatures_and_thresholds_are_those_asked_for(bench, monkeypatch):
    monkeypatch.setattr("specdec.bench.bench.SEEDS", (0,))
    asked = {"trees": [TreeShape(num_levels=3, top_k=3, num_nodes=5)], "thresholds": [0.3, 0.6]}
    small = {"batches": (2,), "max_tokens": 5, "repeats": 1, "num_prompts": 2, "ks": (0, 1)}
    bench.options = replace(bench.options, **small, **asked, temperatures=[0.8])
    names = ("temperature", "rows", "top_k", "threshold")
    assert [tuple(row[name] for name in names) for row in suites.trees(bench)] == [
        *((0.8, 1, 1, None), (0.8, 2, 1, None), (0.8, 2, 1, 0.3), (0.8, 2, 1, 0.6)),
        *((0.8, 6, 3, None), (0.8, 6, 3, 0.3), (0.8, 6, 3, 0.6)),
    ]


@pytest.mark.parametrize("num_runs, is_over", [(1, False), (3, False), (4, True)])
def test_a_run_in_which_kernels_are_compiled_is_repeated(bench, monkeypatch, num_runs, is_over):
    """num_runs: in which one is."""
    seen, compiled = [], Compilations()

    def generate(engine, jobs):
        seen.append(jobs)
        compiled.unexpected["kernel"] += len(seen) <= num_runs
        return real(engine, jobs)

    real = serving.generate
    monkeypatch.setattr(serving, "generate", generate)
    monkeypatch.setattr(serving, "compilations", lambda: compiled)
    engine = bench.engine(Drafting(0))
    given = engine, [prompt[:9] for prompt in bench.pair.prompts[:1]], 1, 3
    if is_over:
        with pytest.raises(RuntimeError, match="compiled in each of 4 runs"):
            serving.serve(*given)
        return
    served = serving.serve(*given)
    assert len(seen) == num_runs + 1
    assert len(served.requests) == 1


def test_help_names_all_suites_in_their_order():
    names, _, _ = SUITES.partition("; ")
    assert names.split(", ") == list(suites.SUITES)


def test_a_suite_that_fails_does_not_cost_the_others(capsys, monkeypatch):
    def fail(_):
        raise RuntimeError("out of memory")

    monkeypatch.setitem(suites.SUITES, "rounds", fail)
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "--suite", "protocol,rounds", *TINY])

    out = capsys.readouterr().out
    assert exit_info.value.code == 1
    assert "FAILED: rounds: RuntimeError: out of memory" in out
    assert "protocol" in json.loads(out.splitlines()[-1])["suites"]


def test_phases_of_a_round_add_up_to_it(bench):
    [plain, _, one, _] = suites.rounds(bench)

    assert plain["decode_draft"] is None
    assert all(one[name] > 0 for name in PHASES)
    assert 0 < one["of_floor"] < 1


@pytest.mark.slow
def test_every_other_suite_runs(bench):
    bench.options = replace(bench.options, contexts=(30, 70))
    names = ("longest_context", "shortest_context", "batch")
    contexts = [tuple(row[name] for name in names) for row in suites.context(bench)]
    one, two = [(30, 30, 1), (70, 70, 1)], [(30, 30, 2), (70, 70, 2), (70, 30, 2)]
    assert contexts == [*one, *two] * 2
    assert [row["batch"] for row in suites.protocol(bench)] == [1, 2, 1, 2]
    for of_a_gpu_only in (suites.capture, suites.exactness, suites.noise):
        assert list(of_a_gpu_only(bench)) == []


def test_cold_has_starts_then_captures_then_memory(bench, monkeypatch):
    monkeypatch.setattr(suites, "starts", lambda _: [{"start": 2}])
    monkeypatch.setattr(suites, "capture", lambda _: [{"chunks": "breakable"}])
    monkeypatch.setattr(colds, "ROUNDS_OF_MEMORY", 10)
    rows = list(suites.cold(bench))
    assert rows[:2] == [{"start": 2}, {"chunks": "breakable"}]
    assert [row["when"] for row in rows[2:]][-1] == "after clear_graphs"
    heads = [each.split()[0] for each in tables(rows).split("\n\n")]
    assert heads == ["start", "chunks", "when"]
    bench.options = replace(bench.options, max_seconds=0.0)
    assert list(suites.cold(bench)) == [{"start": 2}]
    assert bench.skipped == ["cold: capture", "cold: memory"]


@pytest.mark.slow
def test_contexts_are_measured_with_trees_too(bench):
    tree = TreeShape(num_levels=2, top_k=2, num_nodes=4)
    bench.options = replace(bench.options, contexts=(70,), batches=(2,), trees=(tree,))
    rows = list(suites.context(bench))
    drafts = [(row["num_speculative_tokens"], row["rows"]) for row in rows]
    assert drafts == [(0, 1), (2, 3), (2, 5)]
    plain, chain, of_trees = (row["mean_acceptance_length"] for row in rows)
    assert plain == 1
    assert min(chain, of_trees) > 1
    assert all(row["verify_ms"] > 0 for row in rows)


def test_the_first_token_is_timed_with_graphs_and_without(bench, monkeypatch):
    monkeypatch.setattr("specdec.bench.suites.LENGTHS", (3, 20, 10**6))
    rows = list(suites.first_token(bench))

    assert [(row["prompt_tokens"], row["asked"]) for row in rows] == [
        (length, how) for how in ("graphs", "op by op") for length in (3, 20)
    ]
    assert {row["runs_as"] for row in rows} == {"NONE"}  # on a CPU
    assert all(row["ms"] > 0 for row in rows)


def test_a_budget_that_is_spent_leaves_the_rest_out(bench):
    bench.options = BenchOptions(ks=(2,), batches=(1,), num_prompts=1, max_seconds=0.0)

    assert list(suites.protocol(bench)) == []
    assert bench.skipped == ["K = 0, batch 1", "K = 2, batch 1"]


def test_products_are_measured_over_every_weight(bench, monkeypatch):
    monkeypatch.setattr("specdec.bench.products.ROWS", (1, 3))
    rows = list(suites.products(bench))

    assert {"target qkv_proj", "target lm_head", "draft fc", "draft lm_head"} <= {
        row["weight"] for row in rows
    }
    assert all(row["us"] > 0 and row["cublas_us"] > 0 for row in rows)
    layers = bench.pair.target.config.num_layers
    for M in (1, 3):
        parts = {row["weight"]: row["us"] for row in rows if row["M"] == M}
        times = [us for name, us in parts.items() if name.startswith("target ")]
        assert parts["target: all"] == pytest.approx(
            layers * sum(times) - (layers - 1) * parts["target lm_head"]
        )


def test_a_layer_of_experts_is_measured_beside_grouped_products(bench):
    rows = list(suites.experts(bench))

    assert [row["rows"] for row in rows] == [1, 4, 8] * 2
    for row in rows:
        assert "refused" not in row
        assert 2 <= row["hit"] <= 8
        assert row["us"] > row["router_and_route_us"] > 0
        beside = "plain" if "MXFP4" in row["model"] else "grouped"
        assert row[f"over_{beside}"] == pytest.approx(row["us"] / row[f"{beside}_us"])


def test_a_layer_of_experts_that_differs_is_refused(bench, monkeypatch):
    ours = experts.our_layer

    def doubled(x, residual, layer):
        return [2 * out for out in ours(x, residual, layer)]

    monkeypatch.setattr(experts, "our_layer", doubled)
    for row in list(suites.experts(bench))[:3]:
        assert "differs from grouped_mm by" in row["refused"]
        assert "grouped_us" not in row


@pytest.mark.parametrize("T", [1, 64, 2048])
def test_the_search_times_the_rule_and_every_kind_of_tiles(T, monkeypatch):
    is_compiling = False

    def launch(x, ids, gate_up, down, clamp, tiles=None):
        if tiles is not None and tiles.down.block_n == 128 and not is_compiling:
            raise RuntimeError("out of resource")

    @contextmanager
    def compiling(device, progress, may_fail):
        nonlocal is_compiling
        is_compiling = True
        yield
        is_compiling = False

    monkeypatch.setattr(expert_search, "launch_expert_parts", launch)
    monkeypatch.setattr(expert_search, "compiling_ahead", compiling)
    sizes = experts.Sizes("small", 16, 4, 64, 32)
    rule, *rows = expert_search.search(sizes, T, torch.device("cpu"))
    assert rule["tiles"] == "rule"
    assert {row["tiles"].is_sorted for row in rows} == ({True} if T > 64 else {False, True})
    for row in rows:
        assert (row["us"] is None) == (row["tiles"].down.block_n == 128)


@pytest.mark.slow
def test_a_fresh_process_reports_its_phases(bench, monkeypatch):
    monkeypatch.setattr("specdec.bench.cold.STARTS", 1)
    [row] = suites.starts(bench)

    others = ("start", "kernels_compiled", "total", "graphs, GiB")
    phases = {name: value for name, value in row.items() if name not in others}
    assert all(value >= 0 for value in phases.values())
    assert max(phases.values()) < sum(phases.values()) <= row["total"]
    assert (row["start"], row["kernels_compiled"]) == (1, 0)  # a CPU compiles none
    assert row["graphs, GiB"] == 0  # nor captures any
    assert {"python and imports", "target weights", "capture", "first token"} <= set(row)
    assert {"draft weights", "tokenizer"} <= set(row)


def test_trees_for_which_no_time_is_left_are_skipped_by_name(bench):
    bench.options = replace(bench.options, batches=(1,), max_seconds=0.0)
    assert list(suites.trees(bench)) == []
    assert "trees: K = 2, batch 1, temperature 0.0" in bench.skipped


def test_charts_are_drawn_of_what_was_measured(bench, tmp_path):
    pytest.importorskip("matplotlib")
    found = {name: list(suites.SUITES[name](bench)) for name in ("protocol", "rounds")}
    names = ("num_speculative_tokens", "rows", "top_k", "threshold", "tokens_per_second")
    kinds = [(0, 1, 1, None, 9.0), (5, 6, 1, None, 20.0), (6, 8, 4, None, 25.0)]
    kinds += [(6, 8, 4, -1.0, 24.0), (6, 8, 4, 0.2, 30.0), (6, 16, 4, None, 28.0)]
    found["trees"] = [
        {"temperature": T, "batch": batch} | dict(zip(names, kind, strict=True))
        for T in (0.0, 0.7)
        for batch in (1, 8)
        for kind in kinds
    ]
    assert [path.name for path in draw_charts(found, tmp_path, "a CPU", "now-")] == [
        "now-anatomy.png",
        "now-batch.png",
        "now-trees-batch-1.png",
        "now-trees-batch-8.png",
    ]


def test_a_picture_names_device_model_and_dates(tmp_path, monkeypatch):
    card = {
        "device": "NVIDIA H200",
        "target": "/tmp/8b/target",
        "target_bytes_per_pass": 15 * 10**9,
    }
    cards = [card | {"date": date} for date in ("2026-11-23", "2026-11-22", "2026-11-24")]
    what = "NVIDIA H200; {} (15.0 GB a pass); {}"
    assert caption(cards[:1]) == what.format("/tmp/8b/target", "2026-11-23")
    assert caption(cards, "8B") == what.format("8B", "2026-11-22 to 2026-11-24")
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "supxlabel", lambda _, text, **__: drawn.append(text))
    rows = [{"num_speculative_tokens": 0, "batch": 1, "per_user": 9.0, "load": "1 to 8 to 1"}]
    assert draw_charts({"loop": rows}, tmp_path, "a") == []  # of loads that stay, not of ramps
    draw_charts({"protocol": rows}, tmp_path, caption(cards[:1]))
    assert drawn == [caption(cards[:1])]


def test_a_batch_measured_twice_is_one_point():
    rows = [
        {"num_speculative_tokens": K, "batch": B, "per_user": K + v}
        for K, B, v in ((3, 8, 1), (3, 1, 2), (0, 8, 3))
    ]
    rows.append({"num_speculative_tokens": 3, "batch": 8, "per_user": 50})
    points = [(row["num_speculative_tokens"], row["batch"]) for row in latest(rows)]
    assert points == [(3, 1), (3, 8), (0, 8)]
    assert [row["per_user"] for row in latest(rows)] == [5, 50, 3]


def test_memory_is_read_along_the_way(bench, monkeypatch):
    monkeypatch.setattr(colds, "ROUNDS_OF_MEMORY", 28)
    bench.options = replace(bench.options, batches=(8,))
    rows = list(suites.memory(bench))

    rounds = [int(row["when"].split()[1]) for row in rows[:-1]]
    assert len(rounds) == 5
    assert rounds == sorted(rounds)
    assert rounds[-1] >= 28
    assert all(row["host_peak_gib"] > 0 for row in rows)


def test_an_act_that_takes_longer_shows_in_its_own_phase(bench, monkeypatch):
    engine = bench.engine(Drafting(2))
    sampler = engine.runner.acts.sampler
    real = sampler.record

    def slow(step):
        time.sleep(0.02)
        return real(step)

    monkeypatch.setattr(sampler, "record", slow)
    found = time_phases(engine, bench.prompts(1)[:1], 3)
    assert set(found) == set(PHASES)
    assert found["record"] >= 20


def test_requests_are_served_both_ways_with_the_same_tokens(bench, monkeypatch):
    monkeypatch.setattr("specdec.bench.requests.LONGEST_PROMPT", 40)
    monkeypatch.setattr("specdec.bench.requests.LONGEST_ANSWER", 12)
    monkeypatch.setattr("specdec.bench.requests.BATCH", 2)
    jobs = draw_jobs(bench.pair.prompts, 4)
    rows = list(suites.requests(bench))

    assert [row["num_speculative_tokens"] for row in rows] == [0, 0, 2, 2]
    assert [row["served"] for row in rows] == ["one batch at a time", "continuously"] * 2
    num_tokens = sum(params.max_tokens for _, params in jobs)
    num_prompt_tokens = sum(len(prompt) for prompt, _ in jobs)
    for row in rows:
        assert (row["requests"], row["same_tokens"]) == (4, True)
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(num_tokens)
        assert row["prompt_tokens_per_second"] * row["seconds"] == pytest.approx(num_prompt_tokens)
    assert [row["mean_acceptance_length"] > 1 for row in rows] == [False, False, True, True]


def test_lengths_of_requests_are_those_that_are_stated(pair):
    lengths = [(len(prompt), p.max_tokens) for prompt, p in draw_jobs(pair.prompts, 256)]
    prompts, answers = (sorted(column) for column in zip(*lengths, strict=True))

    assert 8 <= min(prompts) <= max(prompts) <= 1024
    assert 4 <= min(answers) <= max(answers) <= 512
    assert 120 < prompts[128] < 200
    assert 100 < answers[128] < 160


def test_capture_sums_the_families_of_both_kinds_of_chunks(bench, monkeypatch):
    engine = bench.engine(Drafting(2))  # of the CPU, which captures nothing
    monkeypatch.setattr("specdec.bench.cold.build_engine", lambda *_: engine)
    monkeypatch.setattr(bench.pair, "device", torch.device("cuda"))
    monkeypatch.setattr(Pair, "drop", lambda _: None)
    monkeypatch.setattr("graphs.counters.GraphCounters.seconds", 0.5)
    rows = list(suites.capture(bench))

    sums = [row for row in rows if row["family"] == "all"]
    assert [row["chunks"] for row in sums] == ["breakable", "compiled"]
    assert {row["seconds"] for row in sums} == {0.5 * (len(rows) / 2 - 1)}
    assert list(rows[0]) == list(sums[0])


def test_wrapped_phases_are_unwrapped(bench, pair):
    engine, seen = bench.engine(Drafting(2)), []

    @contextmanager
    def noted(name):
        seen.append(name)
        yield

    with steady(engine, pair.prompts[:1], 2) as run_round:
        with wrapped(engine.runner.acts, PHASES, noted):
            run_round()
        count = len(seen)
        run_round()
    assert tuple(seen) == PHASES
    assert len(seen) == count
    assert not engine.scheduler.has_unfinished


def test_bytes_and_floor_follow_the_loaded_tensors(pair):
    sizes = bytes_of(pair)
    assert sizes.target == sum(
        t.nbytes for t in pair.target.tensors.values()
    )  # tied: the table is the head
    assert Bytes(target=100, draft_step=10, draft_entry=5).floor_ms(3, 1, 1000) == 135
    assert Bytes(target=100, draft_step=10, draft_entry=5).floor_ms(0, 1, 1000) == 100
    half = Bytes(target=100, experts=64, chosen=0.5)
    assert half.floor_ms(0, 1, 1000) == 132
    assert half.floor_ms(1, 2, 1000) == 160, "of four rows one in 16 leaves an expert out"


def test_a_block_draft_is_measured_with_as_many_drafts_as_it_has_none_of_which_stop(
    pair, monkeypatch
):
    config = block_config(pair.target, **DSPARK | {"block_size": 4})
    tensors = {name: torch.zeros(shape) for name, shape in draft_shapes(config).items()}
    blocks = replace(pair, eagle=SimpleNamespace(config=config, tensors=tensors))
    bench = Bench(blocks, 1e12, BenchOptions())
    bench.check_draft()
    assert bench.ks == (0, 3, 4)
    tree = TreeShape(num_levels=4, top_k=2, num_nodes=7)
    monkeypatch.setattr(suites, "SHAPES", (tree, replace(tree, num_levels=5)))
    monkeypatch.setattr(suites, "_tree_rows", lambda _, drafting, plain: [drafting])
    assert list(suites.trees(bench)) == [Drafting(3), Drafting(4), Drafting(4, tree=tree)]
    most = "=5: a dspark draft with blocks of 4 rows proposes at most 4$"
    for options, words in (
        ({"ks": [5]}, most),
        ({"ks": [1], "trees": [tree, replace(tree, num_levels=5)]}, most),
        ({"thresholds": [0.2]}, "^--thresholds with a dspark"),
    ):
        with pytest.raises(ValueError, match=words):
            Bench(blocks, 1e12, BenchOptions(**options)).check_draft()
    with pytest.raises(ValueError, match=most):
        blocks.engine(EngineSpec(drafting=Drafting(5), max_num_seqs=1, max_model_len=64))
    sizes, read = bytes_of(blocks), {n: x.nbytes for n, x in tensors.items() if "markov" not in n}
    assert sizes.draft_step == 0  # candidates are few rows of markov_w2
    D, (_, G, C) = config.layer.hidden_size, config.heads
    context = 4 * config.num_layers * 2 * G * C * D
    head = pair.target.tensors["embed_tokens.weight"].nbytes
    assert sizes.draft_entry == sum(read.values()) + context + head
    assert not {("draft", "markov_w1"), ("draft", "markov_w2")} & {*weights_of(blocks)}


def test_of_a_selector_a_round_streams_the_projection_alone(pair):
    config = block_config(pair.target, **DFLASH2)
    tensors = {name: torch.zeros(shape) for name, shape in draft_shapes(config).items()}
    blocks = replace(pair, eagle=SimpleNamespace(config=config, tensors=tensors))
    plain = {n: x for n, x in tensors.items() if "selector" not in n}
    without = replace(pair, eagle=SimpleNamespace(config=config, tensors=plain))
    projection = tensors["candidate_selector.hidden_projection.weight"].nbytes
    assert bytes_of(blocks).draft_entry == bytes_of(without).draft_entry + projection
    assert bytes_of(blocks).draft_step == 0
    roles = {role for owner, role in weights_of(blocks) if owner == "draft"}
    assert {"kernel_projection", "hidden_projection"} <= roles
    assert "candidate_selector" not in roles


def test_a_p_eagle_draft_reads_its_layers_once_or_twice_a_round(pair):
    config = eagle3_config(pair.target, mask_token_id=5, trained_drafts=6)
    tensors = {name: torch.zeros(shape) for name, shape in draft_shapes(config).items()}
    masks = replace(pair, eagle=SimpleNamespace(config=config, tensors=tensors))
    trees = BenchOptions(trees=[TreeShape(num_levels=2, top_k=2, num_nodes=3)])
    with pytest.raises(ValueError, match=r"^--trees with a peagle"):
        Bench(masks, 1e12, trees).check_draft()
    bench = Bench(masks, 1e12, BenchOptions())
    assert bench.auto(masks.eagle) == Drafting(6, is_adaptive=True)
    sizes = bytes_of(masks)
    once, twice, more = (sizes.floor_ms(K, 0, 1000) for K in (1, 2, 8))
    assert sizes.draft_step > 0
    assert sizes.draft_entry == tensors["fc.weight"].nbytes
    assert eagle1_config(pair.target).is_read_again("fc.weight")  # it enters the draft's rows
    assert twice - once == pytest.approx(sizes.draft_step)
    assert more == twice


def job(prompt, *token_ids, temperature=0.0, seed=None):
    """A request that has ended."""
    params = SimpleNamespace(temperature=temperature, seed=seed)
    return SimpleNamespace(params=params, prompt_token_ids=prompt, token_ids=list(token_ids))


def test_outputs_are_compared_with_the_longest_that_is_known_of_each_job():
    outputs = Outputs()
    assert outputs.difference([job([1], 1, 2), job([2], 3, 4)]) == {}
    assert outputs.difference([job([1], 1, 2), job([2], 3)]) == {}  # a part of it is the same
    found = outputs.difference([job([1], 1, 2, 5), job([2], 3, 5)])
    assert found == {"refused": "prompt 1 differs from plain decoding at token 1"}
    assert outputs.difference([job([1], 1, 2, 6)])["refused"].endswith("at token 2")
    drawn = [job([1], 7, temperature=0.8, seed=seed) for seed in (0, 1)]
    assert outputs.difference(drawn) == {}
    assert outputs.difference([job([1], 8, temperature=0.8, seed=1)]) != {}
    assert outputs.difference([job([1], 1, 2, seed=1)]) == {}  # greedy: a seed changes nothing


def test_small_pieces():
    assert joined([[1, 2], [3]], 5) == [1, 2, 3, 1, 2]
    assert Spread.of([4.5, 1, 2]) == Spread(2, 1, 4.5, mean=2.5)
    assert table([{"batch": 1, "price": 0.031}, {"batch": 32}]).splitlines()[1].split() == [
        "1",
        "3.1%",
    ]


def test_an_unknown_suite_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "--suite", "speed"])
    assert exit_info.value.code == 2
    assert "allowed are all, protocol" in capsys.readouterr().err


def run(args):
    """A command that ends well."""
    with pytest.raises(SystemExit) as exit_info:
        main(args)
    assert exit_info.value.code in (0, None)


def test_a_loop_keeps_its_load_and_compares_with_plain_decoding(pair, monkeypatch):
    monkeypatch.setattr(loops, "GENERATIONS", 2)
    monkeypatch.setattr(loops, "LEAST_REQUESTS", 2)
    monkeypatch.setattr(loops, "PROMPT_LENGTHS", (4, 9))
    options = BenchOptions(ks=(2,), batches=(1, 3), max_tokens=4, max_model_len=64, repeats=1)
    bench = Bench(pair, 1e12, options)
    rows = list(loops.loop(bench))
    settings = [tuple(row.values())[:4] for row in rows]
    every = itertools.product((0, 2), (1, 3), (0.0, 0.8), (1,))
    assert settings == list(every)
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert all(row["drafts_wasted"] is None or 0 <= row["drafts_wasted"] <= 1 for row in rows)
    assert all(row["gap_ms_p50"] <= row["gap_ms_p99"] for row in rows)
    lengths = {row["num_speculative_tokens"]: row["mean_acceptance_length"] for row in rows}
    assert lengths[0] == 1 < lengths[2]


@pytest.mark.parametrize("is_ramp", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_loop_drafts_trees_for_as_many_requests_as_users_may(pair, monkeypatch, is_ramp):
    for name, value in (("GENERATIONS", 3), ("LEAST_REQUESTS", 1), ("RAMPS", 1)):
        monkeypatch.setattr(loops, name, value)
    monkeypatch.setattr(loops, "PROMPT_LENGTHS", (4, 9))
    monkeypatch.setattr(loops, "MAX_TREE_REQUESTS", 2)
    monkeypatch.setattr("specdec.bench.bench.MAX_TREE_REQUESTS", 2)
    tree = TreeShape(num_levels=2, top_k=2, num_nodes=4)
    loads = {"batches": (2, 3), "temperatures": (0.0,), "ramp": is_ramp}
    options = BenchOptions(ks=(2,), trees=(tree,), max_tokens=4, max_model_len=64, **loads)
    bench = Bench(pair, 1e12, replace(options, repeats=1))
    rows = list(loops.loop(bench))
    assert not [row for row in rows if "refused" in row]
    settings = [(row["num_speculative_tokens"], row["batch"]) for row in rows]
    if is_ramp:  # its largest load is too many
        assert settings == [(0, 3), (2, 3)]
    else:
        assert settings == [(0, 2), (0, 3), (2, 2), (2, 3), ("5x2x2", 2)]
        assert rows[-1]["mean_acceptance_length"] > 1
    [skipped] = bench.skipped
    assert "K = 5x2x2" in skipped
    assert "(trees run for at most 2 requests)" in skipped


def test_a_loop_starts_staggered_and_its_window_holds_whole_generations(pair, monkeypatch):
    monkeypatch.setattr(loops, "GENERATIONS", 3)
    monkeypatch.setattr(loops, "LEAST_REQUESTS", 0)
    options = BenchOptions(ks=(), batches=(4,), max_tokens=8, max_model_len=512)
    bench = Bench(pair, 1e12, options)
    spec = EngineSpec(drafting=Drafting(0), max_num_seqs=4, max_model_len=512)
    window = loops.run_loop(pair.engine(spec), loops.jobs(bench, 4, 0.0), 4)
    pair.drop(spec)
    reasons = [request.finish.reason for request in window.requests]
    assert [len(each.token_ids) for each in window.requests[:4]] == [2, 4, 6, 8]
    assert reasons.count("length") >= 4 * (3 + 1)
    assert reasons.count("abort") == 4
    assert len(window.requests) == 4 * (3 + 2)
    assert len(window.first_tokens) > 4 * (3 - 1)  # the latest ones may wait for theirs


def test_a_window_of_few_requests_at_a_time_holds_more_generations():
    assert [loops.num_measured(batch) for batch in (1, 5, 6, 8)] == [32, 40, 48, 64]


@pytest.mark.slow
def test_a_ramp_rises_and_falls_and_runs_every_request_to_its_end(pair, monkeypatch):
    monkeypatch.setattr(loops, "PROMPT_LENGTHS", (4, 9))
    monkeypatch.setattr(loops, "RAMPS", 2)
    options = BenchOptions(ks=(2,), batches=(1, 4), max_tokens=4, max_model_len=64, ramp=True)
    bench = Bench(pair, 1e12, options)
    levels = []
    run = loops.Loop.run
    monkeypatch.setattr(
        loops.Loop, "run", lambda self, *args: (levels.append(args), run(self, *args))
    )
    rows = list(loops.loop(bench))
    assert [row["num_speculative_tokens"] for row in rows] == [0, 2]
    assert all(row["low"] <= row["tokens_per_second"] <= row["high"] for row in rows)
    stages = [level for level, _ in levels[:6]]
    assert stages == [1, 2, 4, 2, 1, 0]
    assert all(ends == level for level, ends in levels if level > 0)
    monkeypatch.setattr(loops.Loop, "run", run)
    spec = EngineSpec(drafting=Drafting(0), max_num_seqs=4, max_model_len=64)
    _, requests = loops.run_ramp(pair.engine(spec), loops.jobs(bench, 0, 0.0), 4)
    assert all(len(request.token_ids) == 4 for request in requests)
    pair.drop()


def test_noise_is_beside_plain_decoding_and_the_draft_is_itself_again(pair, monkeypatch):
    for name, value in (("GENERATIONS", 3), ("LEAST_REQUESTS", 2), ("PROMPT_LENGTHS", (4, 9))):
        monkeypatch.setattr(loops, name, value)
    monkeypatch.setattr(loops, "STEPS_WITHOUT", 3)
    monkeypatch.setattr(loops, "STEPS_WITH_NOISE", 2)
    monkeypatch.setattr(Bench, "auto", lambda *_: Drafting(2))
    options = BenchOptions(ks=(2,), batches=(2,), max_tokens=8, max_model_len=64)
    bench = Bench(pair, 1e12, options)
    windows, num_steps = [], []
    real = loops.run_loop

    def run_loop(engine, jobs, batch, most_steps):
        num_steps.append(most_steps)
        windows.append(real(engine, jobs, batch, most_steps))
        return windows[-1]

    monkeypatch.setattr(loops, "run_loop", run_loop)
    before = {name: x.clone() for name, x in pair.eagle.tensors.items()}
    [row] = loops.noise(bench)

    assert row["noise_over_plain"] == row["with_noise"] / row["plain"]
    assert 0 < row["again_over_best"] <= 1
    lengths = [window.stats.mean_acceptance_length for window in windows]
    assert lengths[:2] == [1, pytest.approx(1, abs=0.05)]
    assert min(lengths[2:]) > 1.3
    assert num_steps == [2, 2, 3, 3]
    assert all(torch.equal(pair.eagle.tensors[name], x) for name, x in before.items())


def test_prompts_of_steady_rounds_do_not_wait_for_each_other(pair):
    """With 64 rows for each step the first request would end long before the last prompt."""
    spec = EngineSpec(drafting=Drafting(2), max_num_seqs=6, max_model_len=512)
    engine = pair.engine(spec)
    slow = StepCosts(rounds=((64, 1.0),), mixed=((64, 9.0), (128, 18.0)))
    engine.scheduler.prompts = PromptRows(400, PromptBudget(costs=slow, slowdown=1.0))
    prompts = [list(range(3 + i, 403 + i)) for i in range(6)]
    with steady(engine, prompts, 2) as run_round:
        run_round()
        assert len(engine.scheduler.running) == 6
    assert engine.scheduler.prompts.budget is not None


def test_a_percentile_is_in_ms_of_as_few_values_as_there_are():
    found = [percentile(seconds, 99) for seconds in ([], [0.002], [0.001, 0.002])]
    assert found == [None, 2.0, pytest.approx(1.99)]


def test_what_the_host_waits_for_results_is_measured():
    waits, sent = HostWaits(), SimpleNamespace(synchronize=lambda: time.sleep(0.02))
    results = [
        PendingResult(torch.zeros(1, 1), None, event, waits=waits) for event in (sent, sent, None)
    ]
    for result in results:
        result.wait()
    assert waits.seconds >= 0.04
    assert results[0].waits is waits
