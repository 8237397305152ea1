"""The scripts run on the bundled pair as their docstrings say."""

import itertools
import json
import os
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import specdec.kernels.tiles
import specdec.tune.gpu_clock
from scripts.compare_commits import compared
from specdec.bench import charts, serving
from specdec.kernels.tables import read_table
from specdec.kernels.tile_shapes import FP8, Product
from specdec.models.decoder import DecoderModel

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run(capsys, monkeypatch):
    """run("scripts.soak", ...): what a script prints."""

    def call(module: str, *args: str) -> str:
        monkeypatch.delitem(sys.modules, module, raising=False)  # a test may have imported it
        monkeypatch.setattr(sys, "argv", [module, *args])
        monkeypatch.delitem(sys.modules, module, raising=False)
        runpy.run_module(module, run_name="__main__")
        return capsys.readouterr().out

    return call


def test_load_checkpoint_prints_both_bindings_and_times(run, capsys):
    with pytest.raises(SystemExit, match="0"):
        run("scripts.load_checkpoint", "demo", "demo/eagle1")
    out = capsys.readouterr().out

    assert ": llama" in out
    assert ": eagle-1" in out
    assert out.count("  loaded: ") == 2


def test_load_checkpoint_ends_with_the_error(run, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        run("scripts.load_checkpoint", str(tmp_path))
    assert "nothing loaded" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_exchange_finds_the_bits_of_the_library(capfd):
    given = ["--device", "cpu", "--rows", "3,200", "--width", "256"]
    command = [sys.executable, "-m", "scripts.bench_exchange", *given]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["is_gathered"] for row in rows] == [True, False]
    assert all(row["equal"] and row["ours_us"] > row["reader_us"] for row in rows)


@pytest.mark.slow
def test_memcheck_deals_tests_out_and_tells_what_is_found(run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tests = tmp_path / "test_three.py"
    tests.write_text("".join(f"def test_{name}():\n    pass\n\n" for name in "abc"))
    sanitizer = tmp_path / "sanitizer"
    found = "case $* in *test_b*) echo Invalid read; exit $code;; esac"
    sanitizer.write_text(f'#!/bin/sh\ncode=$2\nshift 2\n"$@" || exit $?\n{found}\n')
    sanitizer.chmod(0o755)
    options = "-j", "2", "-m", "not slow", "--sanitizer", str(sanitizer)
    with pytest.raises(SystemExit, match="1"):
        run("scripts.memcheck", *options, tests.name)

    out = capsys.readouterr().out
    assert "3 tests in 2 processes, 1 not clean" in out
    assert out.count("ended with 86") == out.count("PASSED") == out.count("Invalid read") == 1


@pytest.mark.slow
def test_memcheck_goes_on_after_a_test_that_a_signal_ends(run, capsys, tmp_path, monkeypatch):
    """And checks that test again, once it was run without the sanitizer. No failure is lost."""
    monkeypatch.chdir(tmp_path)
    lines = ["import os", "from pathlib import Path"]
    for name in "abcdef":
        lines += [f"def test_{name}():"]
        if name in "ce":
            compiled = "Path('compiled_c').exists()" if name == "c" else "False"
            lines += [f"    if 'SANITIZED' in os.environ and not {compiled}:"]
            lines += ["        os.kill(os.getpid(), 9)"]
        lines += ["    assert False" if name == "b" else f"    Path('compiled_{name}').touch()"]
    (tmp_path / "test_six.py").write_text("\n".join(lines))
    sanitizer = tmp_path / "sanitizer"
    sanitizer.write_text('#!/bin/sh\nshift 2\nSANITIZED=1 exec "$@"\n')
    sanitizer.chmod(0o755)
    options = "-j", "1", "-m", "not slow", "--sanitizer", str(sanitizer), "--logs", "logs"
    with pytest.raises(SystemExit, match="1"):
        run("scripts.memcheck", *options, "test_six.py")

    out = capsys.readouterr().out
    assert out.splitlines()[-3:] == [
        "  clean: test_six.py::test_c",
        "  bad: test_six.py::test_e",
        "6 tests in 5 processes, 2 not clean",
    ]
    text = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert [text.count(f"test_{name} PASSED") for name in "abcdef"] == [1, 0, 1, 1, 0, 1]


TINY_MATRIX = "demo --draft demo -k 3 --batch 2 --num-prompts 2 --num-alone 2 --max-tokens 4"


@pytest.mark.slow
@pytest.mark.parametrize("is_wrong", [False, True])
def test_exact_matrix_compares_all_settings_with_plain_decoding(run, capsys, monkeypatch, is_wrong):
    logits = DecoderModel.logits
    if is_wrong:  # of one row other logits than beside others, though the same tokens
        monkeypatch.setattr(
            DecoderModel, "logits", lambda model, x_TD: logits(model, x_TD) + (len(x_TD) > 1)
        )
    with pytest.raises(SystemExit, match=str(int(is_wrong))):
        run("scripts.exact_matrix", *TINY_MATRIX.split(), "--contexts", "65", "--device", "cpu")

    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    behind = [row for row in rows if row["what"]]
    settings = [(row["k"], row["batch"], row["prompts"]) for row in behind]
    assert settings == [(k, *many) for k in (0, 3, 5) for many in ((1, 2), (8, 8))]
    assert [row["same"] for row in behind] == [True, *[not is_wrong] * 5]
    assert [row["mean"] > 1.5 for row in behind] == [row["k"] > 0 for row in behind]


@pytest.mark.slow
@pytest.mark.parametrize("is_wrong", [False, True])
def test_exact_matrix_compares_the_tokens_of_trees(run, capsys, monkeypatch, is_wrong):
    generate = serving.generate

    def generate_wrongly(engine, requests):
        ended = generate(engine, requests)
        if engine.runner.sizes.tree is not None:
            ended[-1].token_ids[-1] += 1
        return ended

    if is_wrong:
        monkeypatch.setattr(serving, "generate", generate_wrongly)
    few = "-k 0 --trees 7x3x4 --batch 1,48 --num-prompts 2 --num-alone 2 --max-tokens 4"
    command = "scripts.exact_matrix demo --draft demo --contexts 65 --device cpu"
    with pytest.raises(SystemExit, match=str(int(is_wrong))):
        run(*command.split(), *few.split())

    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    trees = [row for row in rows if row["tree"] == "7x3x4"]
    found = [(row["k"], row["batch"], row["what"]) for row in trees]
    assert found == [(3, 1, ""), (3, 32, ""), (3, 32, ""), *((3, b, "context 65") for b in (1, 8))]
    assert all(row["same"] for row in rows if row["tree"] is None)
    assert [row["same"] for row in trees] == [not is_wrong] * 5
    assert all(row["mean"] > 1.5 for row in trees)


@pytest.mark.gpu
def test_exact_matrix_compares_graphs_with_eager_steps(run, capsys):
    options = "--trees", "16x6x4", "--contexts", "65", "--device", "cuda"
    with pytest.raises(SystemExit, match="0"):
        run("scripts.exact_matrix", *TINY_MATRIX.split(), *options)

    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    behind = [(row["k"], row["batch"], row["how"]) for row in rows if row["what"]]
    settings = itertools.product(("eager", "graph"), (0, 3, 5, 6), (1, 8))
    assert behind == [(k, batch, how) for how, k, batch in settings]
    assert all((row["mean"] > 1.5) == (row["k"] > 0) for row in rows if row["what"])


@pytest.mark.slow
@pytest.mark.parametrize("is_wrong", [False, True])
def test_exact_ranks_compares_all_settings_with_one_rank(run, capsys, monkeypatch, is_wrong):
    """Two ranks build one runner after another; rank 0 is told a token that no other was."""
    generate = serving.generate

    def generate_wrongly(engine, requests):
        ended = generate(engine, requests)
        if engine.runner.followers is not None and engine.runner.draft is not None:
            ended[-1].token_ids[-1] += 1
        return ended

    if is_wrong:
        monkeypatch.setattr(serving, "generate", generate_wrongly)
    few = "demo --draft demo -k 2 --batch 2 --num-prompts 2 --max-tokens 6 --device cpu"
    monkeypatch.setenv("SPECDEC_DEBUG", "0")
    with pytest.raises(SystemExit, match=str(int(is_wrong))):
        run("scripts.exact_ranks", *few.split(), "--temperatures", "0.8", "--whole-draft")

    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["ranks"], row["drafts"]) for row in rows] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert [row["differ"] for row in rows] == [[], [], [], [1] * is_wrong]


@pytest.mark.slow
def test_http_costs_something_and_changes_no_text(run, capsys):
    few = "demo --draft demo --device cpu --batch 2 --requests 4 --max-tokens 12 --alone 2"
    with pytest.raises(SystemExit, match="0"):
        run("scripts.http_cost", *few.split())

    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["differ"] == []
    assert [row["through"] for row in found["results"]] == ["HTTP", "AsyncLLM"]
    assert all(row["first_text_ms_p50"] > 0 for row in found["results"])


FEW_GPUS = "demo --draft demo --gpus 2 --device cpu --batch 2 --num-prompts 2 --max-tokens 4"


@pytest.mark.parametrize("ways", ["one", pytest.param("one,halves,all", marks=pytest.mark.slow)])
def test_many_gpus_write_the_same(run, capsys, ways):
    with pytest.raises(SystemExit, match="0"):
        run("scripts.many_gpus", *FEW_GPUS.split(), "--ways", ways, "--waves", "1")

    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["engines"] for row in found] == ways.split(",")
    assert all(row["prompts_that_differ"] == 0 and row["tokens_per_second"] > 0 for row in found)


def test_many_gpus_are_told_apart_by_a_token(run, capsys, monkeypatch):
    """The second server answers one prompt otherwise."""
    monkeypatch.setattr("tests.served.served", lambda *given, **more: nullcontext(given[-1]))
    wrong = iter([0, 0, 1, 0])

    def answers(addresses, bodies, batch):
        texts = [[i, 5] for i in range(len(bodies))]
        texts[-1][1] += next(wrong)
        return [({"choices": [{"token_ids": text}]}, 0.5) for text in texts]

    monkeypatch.setattr("tests.served.closed_loop", answers)
    with pytest.raises(SystemExit, match="1"):
        run("scripts.many_gpus", *FEW_GPUS.split(), "--ways", "one,all", "--waves", "1")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["prompts_that_differ"] for row in found] == [0, 1]


def test_many_gpus_are_halved(run, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("scripts.many_gpus", "demo", "--gpus", "3")
    assert "--gpus 3: give an even number, 2 or more" in capsys.readouterr().err


@pytest.mark.fleet
def test_many_gpus_write_the_same_behind_ray(tmp_path):
    key = tmp_path / "key"
    key.write_text("0" * 64)
    words = [sys.executable, "-m", "scripts.many_gpus", *FEW_GPUS.split(), "--ways", "replicas,one"]
    env = os.environ | {"RAY_AUTH_TOKEN_PATH": str(key)}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [row["prompts_that_differ"] for row in found] == [0, 0]


def test_a_load_is_drawn_from_the_last_file_that_has_it(run, tmp_path, monkeypatch):
    names = ("num_speculative_tokens", "batch", "temperature", "run", "per_user")
    older = [(3, 8, 0.0, 1, 10), (3, 8, 0.0, 2, 11), (3, 1, 0.0, 1, 12), (0, 8, 0.8, 1, 13)]
    newer = [(3, 8, 0.0, 1, 14), (0, 8, 0.0, 1, 15)]
    files = [tmp_path / "older.json", tmp_path / "newer.json"]
    for file, rows in zip(files, (older, newer), strict=True):
        suites = {"loop": [dict(zip(names, row, strict=True)) for row in rows], "k": [file.name]}
        card = {"device": "H200", "target": "8b", "date": file.stem}
        file.write_text(json.dumps({"suites": suites, "card": card}))
    drawn = {}

    def draw(suites, directory, text, prefix):
        drawn.update({name: (rows, text) for name, rows in suites.items()})
        return []

    monkeypatch.setattr(charts, "draw_charts", draw)
    run("scripts.draw_charts", *map(str, files), "--out", str(tmp_path))

    rows, text = drawn["loop"]
    assert [row["per_user"] for row in charts.latest(rows)] == [12, 14, 13, 15]
    assert text == "H200; 8b; newer to older"
    assert drawn["k"] == (["newer.json"], "H200; 8b; newer")


@pytest.mark.slow
def test_our_engine_runs_the_comparison_of_engines(run, tmp_path):
    file = tmp_path / "ours.json"
    given = "ours", "--batch", "2", "--quick", "--json", str(file)
    run("scripts.compare_engines", *given, "--options", '{"device": "cpu"}')

    found = json.loads(file.read_text())
    assert {"card", "date", "commit", "versions", "options", "num_speculative_tokens"} <= set(found)
    speeds = found["tokens_per_second"]
    assert set(speeds) == {"decode", "sampled", "closed_loop", "context"}
    assert all(speeds[name] > 0 for name in ("decode", "sampled", "closed_loop"))
    assert speeds["context"]["40x2"] > 0
    assert set(found["first_token_ms"]) == {"20", "40"}


@pytest.mark.slow  # four engines in two processes
def test_two_trees_are_compared_in_turns(run, tmp_path):
    file = tmp_path / "found.json"
    few = "--most", "1", "--turns", "2", "--answer", "4", "--json", str(file)
    run("scripts.compare_commits", str(ROOT), "--engines", "chains", "tree", *few)

    rows = json.loads(file.read_text())
    assert {row["engine"] for row in rows} == {"chains", "tree"}
    assert {row["what"] for row in rows if "same" in row} == {
        "1 at a time, T = 0.0",
        "1 at a time, T = 0.8",
    }
    assert all(row["same"] and row["B / A"] > 0 for row in rows if "same" in row)


def test_trees_with_other_tokens_are_told_apart():
    turns = [[{"speed": 2.0, "tokens": "a"}, {"speed": speed, "tokens": "b"}] for speed in (1, 3)]
    found = compared(turns)

    assert found == {"A": 2.0, "B": 2, "B / A": 1.0, "A / A": 1.0, "same": False}


class Peer:
    """Another engine, which notes how it is built and what it is asked for."""

    def __init__(self, model=None, **options):
        self.built.append((model or options.pop("model_path"), options))

    def generate(self, prompts=None, params=None, use_tqdm=True, **given):
        asked = params or given["sampling_params"]
        self.asked.append((prompts or given["input_ids"], asked))
        if params is None:
            return [{"meta_info": {"completion_tokens": each["max_new_tokens"]}} for each in asked]
        tokens = [[7] * each["max_tokens"] for each in asked]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=each)]) for each in tokens]


@pytest.mark.parametrize(
    "name, entry, batch, K", [("vllm", "LLM", 2, 5), ("sglang", "Engine", 17, 3)]
)
def test_other_engines_are_asked_for_the_same(run, monkeypatch, name, entry, batch, K):
    monkeypatch.setattr(Peer, "built", [], raising=False)
    monkeypatch.setattr(Peer, "asked", [], raising=False)
    package = SimpleNamespace(**{entry: Peer}, SamplingParams=dict)
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.0")
    out = run("scripts.compare_engines", name, "--batch", str(batch), "--quick")

    assert json.loads(out)["versions"][name] == "1.0"
    [(model, options)] = Peer.built
    assert model == "demo"
    drafts = options.get("speculative_config", options)
    assert K in (drafts.get("num_speculative_tokens"), drafts.get("speculative_num_steps"))
    assert batch in (options.get("max_num_seqs"), options.get("max_running_requests"))
    prompts, params = Peer.asked[0]
    assert len(prompts) == len(params) <= batch
    assert params[0]["ignore_eos"] is True
    assert {each[1][0]["temperature"] for each in Peer.asked} == {0.0, 0.8}
    sizes = {len(prompts) for prompts, _ in Peer.asked}
    assert {batch, 9 * batch} <= sizes


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_is_one_line(run, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=f"^{name}: .*; pip install {name}, in an environment of"):
        run("scripts.compare_engines", name)


@pytest.mark.slow
def test_soak_says_that_nothing_is_wrong(run):
    with pytest.raises(SystemExit, match="0"):
        run("scripts.soak", "--num-requests", "2")


@pytest.fixture
def fake_gpu(monkeypatch):
    """Every candidate takes a microsecond, by a clock of ours."""

    class FakeClock:
        has_wgmma = False

        def __init__(self, device: object, is_block: bool) -> None:
            print("block" if is_block else "channel")

        def prepare(self, jobs) -> None: ...

        def time(self, job) -> float:
            return 1.0

    monkeypatch.setattr(specdec.tune.gpu_clock, "GpuClock", FakeClock)
    monkeypatch.setattr(specdec.kernels.tiles, "gpu_name", lambda device: "GPU")


def test_tune_products_adds_what_the_table_lacks(run, fake_gpu, tmp_path):
    out = str(tmp_path / "table.json")
    run("scripts.tune_products", "--shapes", "split:512x4096,whole:64x64", "--out", out)
    text = run("scripts.tune_products", "--shapes", "whole:64x64,gate:128x64", "--out", out)
    fp8 = "--dtype", "float8_e4m3fn", "--block"
    of_fp8 = run("scripts.tune_products", "--shapes", "gate:256x64", *fp8, "--out", out)

    assert text.startswith("channel\nGPU: 1 of 2 products\n")
    assert of_fp8.startswith("block\nGPU: 1 of 1 products\n")
    entries = read_table(tmp_path / "table.json")["GPU"]
    wanted = [Product("split", 512, 4096), Product("whole", 64, 64), Product("gate", 128, 64)]
    assert list(entries) == [*wanted, Product("gate", 256, 64, FP8)]


def test_tune_products_compares_the_rule_on_random_products(run, fake_gpu, tmp_path):
    file = tmp_path / "random.json"
    text = run("scripts.tune_products", "--random", "5", "--json", str(file))

    assert json.loads(text.splitlines()[-1])["rule_over_tuned"]["overall"] == 1.0
    assert len(json.loads(file.read_text())["products"]) == 5


def test_tune_products_stops_in_time_and_says_what_is_left(run, fake_gpu, tmp_path):
    out = str(tmp_path / "table.json")
    text = run("scripts.tune_products", "--max-seconds", "0", "--models", "qwen3-8b", "--out", out)
    assert "no time for 8: split,6144,4096,bfloat16 " in text


def test_bench_experts_prints_each_row_and_keeps_all(run, tmp_path):
    file = tmp_path / "rows.json"
    bandwidth, *lines = run("scripts.bench_experts", "--rows", "1,2", "--json", str(file)).split(
        "\n"
    )
    assert bandwidth.endswith(" GB/s")
    rows = [json.loads(line) for line in lines if line]
    assert [row["rows"] for row in rows] == [1, 2] * 2
    assert json.loads(file.read_text()) == rows
    with pytest.raises(SystemExit, match="--search needs a GPU"):
        run("scripts.bench_experts", "--search")


def test_scripts_are_short():
    lines = {file.name: len(file.read_text().splitlines()) for file in Path("scripts").glob("*.*")}
    assert {name: count for name, count in lines.items() if count >= 120} == {}


@pytest.mark.parametrize(
    "model",
    [
        "tiny",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("tiny-gpt-oss", "tiny-fp8")),
    ],
)
def test_bench_random_times_random_weights(run, capsys, model):
    options = "--suite protocol -k 1 --batch 1 --num-prompts 1 --max-tokens 4 --repeats 1"
    with pytest.raises(SystemExit, match="0"):
        run("scripts.bench_random", model, *options.split(), "--device", "cpu")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["num_speculative_tokens"] for row in found] == [0, 1]
    with pytest.raises(
        SystemExit, match="huge: give one of qwen3-30b-a3b, qwen3-30b-a3b-fp8, llama"
    ):
        run("scripts.bench_random", "huge")


@pytest.mark.slow
def test_bench_block_times_drafts_of_every_kind(run, capsys, tmp_path):
    small = "--rounds 2 --num-prompts 1 --max-tokens 6 --max-model-len 512 --device cpu"
    options = f"tiny -k 2,5 --batch 1,2 {small} --oracle 1,1,1,1,1 --oracle eagle3=1,1"
    file = tmp_path / "run.json"
    *lines, last = run("scripts.bench_block", *options.split(), "--json", str(file)).splitlines()
    found = json.loads(last)["suites"]["drafts"]
    assert json.loads(file.read_text()) == json.loads(last)
    assert [json.loads(line) for line in lines if line.startswith("{")] == found
    kinds = [(kind, K) for kind in ("dspark", "dflash", "dflash2", "peagle") for K in (2, 5)]
    known = [(row["draft"], row["num_speculative_tokens"], row["batch"]) for row in found]
    assert known == [(*kind, B) for kind in (("none", 0), *kinds, ("eagle3", 2)) for B in (1, 2)]
    for row in found:
        assert row["verify_ms"] > 0
        assert row["mean_acceptance_length"] == 1 + row["num_speculative_tokens"]
    with pytest.raises(SystemExit):
        run("scripts.bench_block", "tiny", "--oracle", "eagle3=0.1,0.2")
    assert "--oracle 0.1,0.2: give a number above 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("scripts.bench_block", "tiny", "--kind", "medusa")
    assert (
        "--kind medusa: give some of dflash, dspark, dflash2, peagle, eagle3"
        in capsys.readouterr().err
    )
