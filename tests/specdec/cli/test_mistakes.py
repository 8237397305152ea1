"""What users get wrong: one line that says what to do, exit code 2, and no weights are read."""

import json
import sys
from io import StringIO
from pathlib import Path

import pytest

import specdec.bench.pair
import specdec.cli.checkpoints
import specdec.start.runners
from weights.demo import demo_directory

ROOT = Path(__file__).parents[3]
DRAFTED = ("generate", "demo", "x", "--draft", "demo")
SAMPLED = (*DRAFTED, "--temperature", "1")
# files that the fixture below makes; {} is its directory
MISTAKES = [
    # the command line itself
    ("genrate demo x", "no such command 'genrate'. Did you mean 'generate'? (see specdec --help)"),
    ("--colour", "no such option: --colour"),
    ("cache export kernels.tar.gz", "the command 'cache' is gone: set TRITON_CACHE_DIR, and copy"),
    ("cache --help", "the command 'cache' is gone"),
    ("generate", "missing argument 'TARGET' (see specdec generate --help)"),
    ("verify demo", "missing argument 'DRAFT'"),
    ("generate demo x --tempature 1", "no such option: --tempature (Possible options: --temp"),
    ("generate demo x y", "got unexpected extra argument"),
    ("generate demo x --draft", "option '--draft' requires an argument"),
    ("generate demo x --seed ten", "--seed ten: "),
    ("generate demo x --max-tokens 1e3", "--max-tokens 1e3: "),
    ("generate demo x -n 0", "--n 0: give an integer from 1 to 1024"),
    ("verify demo demo -k", "requires an argument"),
    # the prompt
    ("generate demo", "no prompt: standard input is empty"),
    ("generate demo -", "no prompt: standard input is empty"),
    ("generate demo --prompt-file -", "no prompt-file: standard input is empty"),
    ("chat demo", "no message: standard input is empty"),
    ("generate demo x --prompt-file {}/text", "a prompt and --prompt-file: give one of them"),
    ("generate demo --prompt-file {}/none", "{}/none: No such file or directory; give a text"),
    ("generate demo --prompt-file {}", "--prompt-file {}: Is a directory; give a text file"),
    ("generate demo --prompt-file {}/bytes", "{}/bytes: no text in UTF-8"),
    ("chat demo --chat-template {}/none", "--chat-template {}/none: No such file or directory"),
    ("chat demo --chat-template {}", "Is a directory; give a text file"),
    ("chat demo --chat-template {}/jinja", "--chat-template is no valid Jinja: "),
    # checkpoints
    ("generate ./nowhere x", "target ./nowhere: no such directory"),
    ("generate demo x --draft ./nowhere", "draft ./nowhere: no such directory"),
    ("generate {}/text x", "no directory; give the directory that holds config.json"),
    ("generate {} x", "model.safetensors nor model.safetensors.index.json; nothing loaded"),
    ("generate {}/bin x", "no code is run): specdec convert {}/bin; nothing loaded"),
    ("generate demo/eagle3 x", "no such target (allowed: demo, demo/target)"),
    ("generate {}/eagle3 x", "this is an EAGLE draft, no target"),
    ("generate demo x --draft demo/eagle2", "allowed: demo, demo/eagle3, demo/eagle1"),
    ("generate demo x --draft demo/target", "allowed: demo, demo/eagle3, demo/eagle1"),
    ("generate demo-dspark x", "directory, a hub id owner/name, demo or demo-experts)"),
    ("generate demo x --draft demo-dflash", "name, demo, demo-dspark or demo-experts)"),
    ("generate demo x --draft demo-dspark/a", "no such draft (allowed: demo-dspark)"),
    ("inspect demo/x", "allowed: demo, demo/target, demo/eagle3, demo/eagle1"),
    ("load demo demo/x", "allowed: demo, demo/eagle3, demo/eagle1"),
    ("convert {}/none", "'{}/none' does not exist (see specdec convert --help)"),
    ("convert {}", "needs pytorch_model.bin or"),
    (
        "widen {}/out --shape huge",
        "--shape 'huge': allowed are llama-8b, llama-14b, llama-1b, tiny",
    ),
    ("widen {}/out --source {}", "--source {}: no target/config.json in it; give demo"),
    # the draft
    (
        "generate demo x --draft demo -k 99",
        "--num-speculative-tokens 99: give an integer from 0",
    ),
    (
        "generate demo x --draft demo -k -1",
        "--num-speculative-tokens -1: give an integer from 0",
    ),
    ("verify demo demo -k 99", "--num-speculative-tokens 99: give an integer from 1"),
    ("generate demo x --draft demo -k lots", "--num-speculative-tokens lots: give an integer, or"),
    ("generate demo x -k auto", "--num-speculative-tokens auto without a draft: give --draft too"),
    (
        "bench demo --adaptive",
        "--adaptive is for the suites loop, noise, requests, cold: give",
    ),
    (
        "bench demo --trees 8x6x4",
        "--trees 8x6x4 is for the suites context, loop, trees, requests: give one of them",
    ),
    (
        "bench demo --temperatures 0.7",
        "--temperatures 0.7 is for the suites loop, noise, trees: give",
    ),
    ("bench demo --oracle 0.5", "--oracle 0.5 is for the suite drafts alone: give --suite drafts"),
    (
        "bench demo --suite drafts --oracle 0.5,0.6",
        "--oracle 0.5,0.6: give a number above 0 and at",
    ),
    ("bench demo --suite drafts --oracle 2", "--oracle 2: give numbers of at least 0.0, at most 1"),
    ("bench demo --suite drafts --oracle high", "--oracle high: give numbers with commas between"),
    ("bench {} --suite drafts --oracle 0.5", "--oracle without a draft: give --draft too"),
    ("bench demo --suite drafts --oracle 0.5 -tp 2", "--oracle replaces the drafts of one GPU"),
    ("bench demo --suite trees --trees 8x6", "--trees 8x6: give rows x levels x top_k, as in"),
    ("bench demo --suite trees --trees 9x6x1", "--trees 9x6x1: a tree has 1 level or more, a top"),
    ("bench demo --suite trees --trees 9x1x4", "--trees 9x1x4: a tree has 1 level or more, a top"),
    ("bench demo --suite trees --thresholds x", "--thresholds x: give numbers with commas between"),
    ("bench demo --suite trees --thresholds 2", "--thresholds 2: give numbers of at least -1.0,"),
    ("generate demo x -k 3", "--num-speculative-tokens 3 without a draft: give --draft too"),
    ("generate demo x --acceptance block", "--acceptance block without a draft: give --draft"),
    ((*SAMPLED, "--acceptance", "fast"), "--acceptance 'fast': allowed are exact, rejection, bl"),
    ((*DRAFTED, "--acceptance", "block"), "--acceptance block with --temperature 0"),
    (
        (*SAMPLED, "--acceptance", "block", "-k", "0"),
        "--num-speculative-tokens 0: there are no drafts",
    ),
    ("chat demo --draft demo --acceptance rejection", "give --temperature too, or leave"),
    # sampling
    ("generate demo x --top-p 0.9", "--top-p 0.9 with --temperature 0, which takes the best"),
    ("generate demo x --temperature -1", "--temperature -1.0: give 0 (greedy) or a number"),
    ("generate demo x -n 2", "--n 2 with --temperature 0: greedy samples are equal"),
    ("generate demo x --logprobs 2", "--logprobs 2 without --json"),
    ("generate demo x --max-tokens 0", "--max-tokens 0: give an integer of at least 1"),
    # the engine
    ("generate demo x --dtype int8", "--dtype 'int8': allowed are auto, float32"),
    ("generate demo x --device gpu", "--device 'gpu': give auto, cpu, cuda or cuda:N"),
    ("generate demo x --max-num-seqs 0", "--max-num-seqs 0: give an integer from 1 to 4096"),
    ("generate demo x --show-drafts", "--show-drafts without a draft: give --draft too"),
    ("verify demo demo --device cpu --gpu-memory-utilization 2", "give a number from 0.01 to"),
    ("generate demo x --cuda-graph-sizes 1;2", "give integers with commas between them"),
    ("generate demo x --enforce-eager --cuda-graph-sizes 1", "--enforce-eager captures nothing"),
    # bench
    ("bench --suite speed", "--suite speed: allowed are all, protocol"),
    (
        "bench --suite k",
        "--suite k: there is no such suite any more; give --suite protocol,rounds -k 0",
    ),
    (
        "bench --suite rounds,ramp",
        "--suite ramp: there is no such suite any more; give --suite loop --r",
    ),
    ("bench --suite all,zero", "--suite zero: there is no such suite any more; compare K = 0 of"),
    ("bench --ramp", "--ramp is for the suite loop alone: give --suite loop too"),
    ("bench --batch many", "--batch many: give integers with commas between them"),
    ("bench --num-prompts 0", "--num-prompts 0: "),
    ("bench --batch 0", "--batch 0: give numbers of at least 1, at most 4096"),
    ("bench --gpu-memory-utilization 0.5", "no such option: --gpu-memory-utilization"),
    ("bench --suite noise --enforce-eager", "with the suite noise, which measures graphs"),
    ("bench --suite context --max-model-len 64", "is for the suites protocol, rounds, exactness"),
    ("bench --prompts {}/text", "give JSON"),
    ("bench --json {}/no/run.json", "--json {}/no/run.json: there is no directory {}/no"),
    ("bench --json {}", "--json {}: a directory; give a file"),
    ("bench --charts {}", 'charts need matplotlib: pip install "specdec[bench]"'),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_place(tmp_path)


def make_place(tmp_path: Path) -> Path:
    """A directory with no checkpoint, and in it what the mistakes name."""
    (tmp_path / "text").write_text("def f(x):\n")
    (tmp_path / "jinja").write_text("{% for m in messages %}{{ m.content }}")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"")
    config = json.loads((demo_directory("target") / "config.json").read_text())
    (tmp_path / "bin" / "config.json").write_text(json.dumps(config))
    (tmp_path / "eagle3").symlink_to(demo_directory("eagle3"))
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights, no input, no matplotlib."""
    for module in (specdec.start.runners, specdec.cli.checkpoints):
        monkeypatch.setattr(module, "load_target", lambda *_, **__: pytest.fail("weights read"))
    monkeypatch.setattr(sys, "stdin", StringIO("\n"))
    monkeypatch.setattr("specdec.cli.before_torch.find_spec", lambda name: None)


@pytest.mark.parametrize("args, words", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(run, place, args, words):
    given = args.split() if isinstance(args, str) else args
    code, out, err = run(*(arg.replace("{}", str(place)) for arg in given))

    assert (code, out) == (2, "")
    assert err.startswith("specdec: error: ")
    assert err.count("\n") == 1
    assert words.replace("{}", str(place)) in err


def test_a_level_of_the_log_that_does_not_exist_is_a_mistake_too(run, monkeypatch):
    monkeypatch.setenv("SPECDEC_LOG", "loud")
    words = "specdec: error: SPECDEC_LOG='loud': give debug, info, warning or error\n"
    assert run("inspect", "demo") == (2, "", words)


def test_without_a_command_the_help_is_printed(run):
    code, out, err = run()

    assert (code, out) == (2, "")
    assert "Usage: specdec" in err
