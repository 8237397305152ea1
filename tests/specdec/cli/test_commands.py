"""What commands share, and the small ones: options of the engine, input, colours, Ctrl-C."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from io import StringIO

import pytest
from typer import Abort, Typer

import specdec
import specdec.bench.pair
import specdec.cli.generate
from specdec import LLM, AsyncLLM
from specdec.bench.pair import Pair
from specdec.cli.errors import run_command
from specdec.engine import Engine
from specdec.requests.stats import RequestStats
from weights.demo import demo_directory

DRAFTED = ("generate", "demo", "def fibonacci(n):", "--draft", "demo")
NO_EFFECT = "seed has no effect at temperature 0\n"


def test_the_version_is_that_of_the_package(run):
    assert run("--version") == (0, f"specdec {specdec.__version__}\n", "")


def test_load_prints_both_bindings(run):
    code, out, err = run("load", "demo", "demo/eagle1")

    assert (code, err) == (0, "")
    assert ": llama" in out
    assert ": eagle-1" in out
    assert out.count("  loaded: ") == 2


@pytest.fixture
def built(monkeypatch) -> list[dict[str, object]]:
    """The options of each LLM that a command builds; it builds none."""
    options: list[dict[str, object]] = []

    def build(self: LLM, *_: object, **given: object) -> None:
        options.append(given)
        raise ValueError("enough")

    monkeypatch.setattr(LLM, "__init__", build)
    monkeypatch.setattr(AsyncLLM, "__init__", build)
    monkeypatch.setattr(sys, "stdin", StringIO("hi"))
    return options


@pytest.mark.parametrize(
    "command", [("generate", "demo", "x"), ("chat", "demo"), ("verify", "demo", "demo")]
)
def test_the_options_of_the_engine_reach_it(run, built, command):
    options = "--max-model-len 99 --max-num-seqs 3 --gpu-memory-utilization 0.5 --dtype bfloat16"
    run(*command, *options.split(), "--device", "cpu", "--enforce-eager")

    wanted = {"max_model_len": 99, "max_num_seqs": 3, "gpu_memory_utilization": 0.5}
    wanted |= {"dtype": "bfloat16", "device": "cpu", "enforce_eager": True}
    assert {name: built[0].get(name) for name in wanted} == wanted
    assert "num_kv_blocks" not in built[0]


def test_the_seed_of_verify_is_the_engines(run, built):
    run("verify", "demo", "demo", "--seed", "7")
    assert built[0]["seed"] == 7


def test_verify_says_that_its_seed_draws_nothing(run):
    code, _, err = run("verify", "demo", "demo", "--max-tokens", "16", "--seed", "7")
    assert (code, NO_EFFECT in err) == (0, True)


@pytest.fixture
def benched(run, monkeypatch) -> Callable[..., Pair]:
    """benched(options): the pair of a short run of bench."""

    def call(*options: str) -> Pair:
        pairs: list[Pair] = []
        real = Pair.engine

        def engine(self: Pair, *given: object, **more: object) -> Engine:
            pairs.append(self)
            return real(self, *given, **more)

        monkeypatch.setattr(Pair, "engine", engine)
        short = shlex.split("-k 2 --num-prompts 1 --max-tokens 4 --repeats 1 --device cpu")
        code, _, err = run("bench", *short, *options)
        assert code == 0, err
        return pairs[-1]

    return call


def test_bench_builds_its_engines_with_the_options(benched, monkeypatch):
    sizes = []
    seeds = []
    assemble = specdec.bench.pair.assemble

    def assembled(*args: object, seed: int | None) -> Engine:
        seeds.append(seed)
        return assemble(*args, seed=seed)

    monkeypatch.setattr(specdec.bench.pair, "assemble", assembled)
    real = Pair.engine
    monkeypatch.setattr(
        Pair, "engine", lambda *args: sizes.append(real(*args).runner.sizes) or real(*args)
    )
    pair = benched("--seed", "5", "--enforce-eager", "--batch", "3", "--max-model-len", "512")

    assert (pair.config.seed, pair.config.enforce_eager) == (5, True)
    assert set(seeds) == {5}
    assert (sizes[-1].max_num_seqs, sizes[-1].max_model_len) == (3, 512)


def test_a_suite_that_cannot_run_says_why_in_one_line(run):
    code, out, err = run("bench", "--max-model-len", "64", "--num-prompts", "1", "--device", "cpu")

    words = "FAILED: protocol: prompt of 161 tokens leaves no room for an answer in --max-model-len"
    assert (code, words in out) == (1, True)
    assert "Traceback" not in err


def test_greedy_decoding_says_that_a_seed_has_no_effect(run):
    short = (*DRAFTED, "--max-tokens", "4")
    plain = run(*short)
    seeded = run(*short, "--seed", "3")

    assert seeded[:2] == plain[:2]
    assert NO_EFFECT in seeded[2]
    assert NO_EFFECT not in plain[2]
    assert NO_EFFECT not in run(*short, "--seed", "3", "--temperature", "1")[2]


@pytest.mark.parametrize("args", [("-",), ("--prompt-file", "-"), ()])
def test_a_dash_is_standard_input(run, monkeypatch, args):
    expected = run("generate", "demo", "def f(x):", "--max-tokens", "6")[1]
    monkeypatch.setattr(sys, "stdin", StringIO("def f(x):\n"))

    assert run("generate", "demo", *args, "--max-tokens", "6")[:2] == (0, expected)


@pytest.mark.parametrize("kind", ["FIFO", "device", "long"])
@pytest.mark.parametrize("args", ["generate demo --prompt-file", "chat demo --chat-template"])
def test_a_text_without_an_end_is_one_line(run, tmp_path, kind, args):
    file = tmp_path / "text"
    wanted = f"{file}: a pipe or a device, a regular file is needed"
    if kind == "FIFO":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as stream:
            stream.truncate(1 << 40)
        wanted = f"{file}: more than {64 << 20} bytes"
    option = args.split()[-1]
    end = "; give a text file, or - for standard input\n"
    expected = (2, "", f"specdec: error: {option} {wanted}{end}")
    assert run(*args.split(), str(file)) == expected


@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_prompts_of_a_benchmark_without_an_end_are_one_line(run, tmp_path, kind):
    file = tmp_path / "prompts.json"
    if kind == "FIFO":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    code, out, err = run("bench", "--prompts", str(file), "--device", "cpu")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "prompts.json: not a file, a regular file is needed" in err


@pytest.mark.parametrize(
    "args, what",
    [
        ("generate demo", "prompt"),
        ("generate demo --prompt-file -", "prompt-file"),
        ("chat demo", "message"),
    ],
)
def test_a_standard_input_without_an_end_is_one_line(run, monkeypatch, args, what):
    with open("/dev/zero", encoding="utf-8") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        found = run(*args.split())
    words = f"standard input: more than {64 << 20} characters for the {what}"
    assert found == (2, "", f"specdec: error: {words}\n")


@pytest.mark.parametrize("value, has_colors", [("1", False), ("", True)])
def test_no_color_means_no_escape_sequence(run, monkeypatch, value, has_colors):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = run(*DRAFTED, "--max-tokens", "40", "--show-drafts")
    written = run(*DRAFTED, "--max-tokens", "4")

    texts = [shown[1], written[2]]
    assert ["\x1b" in text for text in texts] == [has_colors] * 2
    assert ("{+" in shown[1]) != has_colors
    assert "def fibonacci" in written[2]


@pytest.mark.parametrize("args", [(), ("--json",), ("-n", "2", "--temperature", "1")])
def test_more_tokens_than_the_context_holds_are_said_to_be_cut(run, args):
    given = ("--max-model-len", "32", "--ignore-eos", *args)
    code, out, err = run(*DRAFTED, "--max-tokens", "40", *given)
    assert code == 0
    assert "--max-tokens 40: 22 tokens fit after the prompt\n" in err
    if "--json" in args:
        assert len(json.loads(out)["token_ids"]) == 22
        assert "fit after the prompt" not in run(*DRAFTED, "--max-tokens", "22", *given)[2]


@pytest.fixture
def interrupted(monkeypatch) -> None:
    """Ctrl-C in the sixth step."""
    real, steps = Engine._step, []

    def step(self: Engine) -> object:
        steps.append(1)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Engine, "_step", step)


@pytest.mark.parametrize(
    "args", [(), ("--show-drafts",), ("-n", "2", "--temperature", "1"), ("--json",)]
)
def test_ctrl_c_prints_the_figures_so_far(run, interrupted, args):
    code, out, err = run(*DRAFTED, *args)

    lines = err.splitlines()[1:]
    assert (code, lines[-1]) == (130, "specdec: interrupted")
    assert ("rounds | interrupted" in err) == ("--json" not in args)
    assert (len(lines) == 1) == ("--json" in args)
    assert bool(out.strip()) == (args in ((), ("--show-drafts",)))


def test_drafts_are_shown_as_rounds_commit(run, request):
    _, whole, _ = run(*DRAFTED, "--max-tokens", "40", "--show-drafts")
    request.getfixturevalue("interrupted")
    _, out, _ = run(*DRAFTED, "--max-tokens", "40", "--show-drafts")

    assert whole.startswith(out.removesuffix("\n"))
    assert len(out) < len(whole)
    assert "{+" in out.partition("\n\n")[2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, Abort])
def test_ctrl_c_has_the_code_of_a_shell_whichever_way_typer_reports_it(capsys, error):
    def fail() -> None:
        raise error

    app = Typer()
    app.command()(fail)
    with pytest.raises(SystemExit, match="130"):
        run_command(app, [])
    assert capsys.readouterr().err == "specdec: interrupted\n"


def test_ctrl_c_before_the_first_token_is_one_line(run, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "__init__", interrupt)
    assert run(*DRAFTED) == (130, "", "specdec: interrupted\n")


@pytest.mark.parametrize("command", ["chat", pytest.param("generate", marks=pytest.mark.slow)])
def test_a_draft_that_is_hardly_ever_accepted_gets_a_warning(run, monkeypatch, command):
    useless = property(lambda self: 1.05)
    monkeypatch.setattr(RequestStats, "mean_acceptance_length", useless)
    draft = str(demo_directory("eagle3"))
    prompt = ("def fibonacci(n):",) if command == "generate" else ()
    monkeypatch.setattr(sys, "stdin", StringIO("def fibonacci(n):"))
    args = (command, "demo", *prompt, "--draft", draft, "--max-tokens", "80")

    assert f"specdec verify demo {draft}\n" in run(*args)[2]
    assert "specdec verify" not in run(*args, "-k", "0")[2]


def test_json_has_the_warning_on_stderr_only(run, monkeypatch):
    monkeypatch.setattr(RequestStats, "mean_acceptance_length", property(lambda self: 1.0))
    _, out, err = run(*DRAFTED, "--max-tokens", "80", "--json")

    assert json.loads(out)["finish_reason"] == "length"
    assert "warning: hardly any draft" in err
