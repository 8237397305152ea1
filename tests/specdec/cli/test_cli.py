"""The command `specdec` as a user calls it: stdout, stderr, and the exit code."""

import json
import re
import shlex
import shutil
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from specdec import LLM, SamplingParams
from specdec.cli import main
from specdec.cli.drafts_view import DraftsView
from specdec.cli.verify import CODE_STARTS, QUESTIONS
from specdec.requests.draft_spans import DraftRound, Span
from specdec.runner import Runner
from weights.demo import demo_directory

TENSORS = str(next(demo_directory("target").glob("*.safetensors")))
PROMPT = "def fibonacci(n):"
DRAFTED = ("generate", "demo", PROMPT, "--draft", "demo")


@pytest.fixture(scope="module")
def expected() -> str:
    """What the target writes without a draft."""
    llm = LLM("demo", device="cpu", max_num_seqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("draft", [(), ("--draft", "demo"), ("--draft", "demo/eagle1", "-k", "2")])
def test_generate_prints_the_text_of_plain_decoding(run, expected, draft):
    code, out, err = run("generate", "demo", PROMPT, "--max-tokens", "40", *draft)

    assert (code, out) == (0, expected + "\n")
    assert "40 tokens in" in err
    assert ("acceptance length" in err) == bool(draft)


class Flushed(StringIO):
    """Remembers what could be read at each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def test_generate_writes_the_text_as_it_comes(run, expected, monkeypatch):
    out = Flushed()
    monkeypatch.setattr(sys, "stdout", out)
    run(*DRAFTED, "--max-tokens", "40")

    assert out.getvalue() == expected + "\n"
    assert len(set(out.seen)) > 8
    assert all(expected.startswith(seen) for seen in out.seen[:8])


def test_a_negative_seed_is_taken_and_the_used_one_is_told(run):
    sampled = ("generate", "demo", PROMPT, "--max-tokens", "8", "--temperature", "1", "--json")
    found = [json.loads(run(*sampled, "--seed", seed)[1]) for seed in ("-5", str(2**64 - 5), "-1")]
    assert [each["seed"] for each in found[:2]] == [2**64 - 5] * 2
    assert found[0]["text"] == found[1]["text"]
    assert found[2]["seed"] >= 0


def test_several_samples_are_written_one_after_another(run, monkeypatch):
    sampled = ("generate", "demo", PROMPT, "--max-tokens", "8", "--temperature", "1", "--seed", "3")
    texts = [json.loads(run(*sampled[:-1], seed, "--json")[1])["text"] for seed in ("3", "4")]

    written = f"--- sample 1 of 2 ---\n{texts[0]}\n--- sample 2 of 2 ---\n{texts[1]}\n"
    assert run(*sampled, "-n", "2", "--no-prefix-caching")[1] == written


def test_json_is_one_object_with_text_ids_and_statistics(run, expected):
    code, out, _ = run(*DRAFTED, "--max-tokens", "40", "-k", "5", "--json")

    result = json.loads(out)
    assert (code, result["text"], len(result["token_ids"])) == (0, expected, 40)
    assert result["finish_reason"] == "length"
    assert result["num_speculative_tokens"] == 5
    assert result["stats"]["mean_acceptance_length"] > 2
    assert "rounds" not in result


def test_json_with_show_drafts_holds_every_round(run):
    _, out, _ = run(*DRAFTED, "--max-tokens", "20", "--json", "--show-drafts")

    result = json.loads(out)
    assert len(result["rounds"]) == result["stats"]["num_rounds"]
    assert set(result["rounds"][0]) == {"draft_tokens", "num_accepted", "sampled_token"}


def test_a_tree_is_drafted_named_and_shown(run):
    tree = ("-k", "3", "--draft-top-k", "3", "--num-draft-tokens", "7")
    tree += ("--draft-confidence-threshold", "0.9")
    _, chain, _ = run(*DRAFTED, "--max-tokens", "16")
    _, out, err = run(*DRAFTED, *tree, "--max-tokens", "16", "--json", "--show-drafts")
    result = json.loads(out)
    assert result["text"] == chain.removesuffix("\n")
    assert (result["draft_top_k"], result["num_draft_tokens"]) == (3, 7)
    assert "trees of 7 nodes, top_k = 3, 3 levels, stopping below 0.9" in err
    assert result["draft_confidence_threshold"] == 0.9
    assert {len(each["draft_tokens"]) for each in result["rounds"]} == {3, 7}
    assert all(len(each["parents"]) == len(each["draft_tokens"]) for each in result["rounds"])
    for options, words in (
        (("--num-draft-tokens", "1"), "--num-draft-tokens 1 without a"),
        (("--draft-top-k", "3"), "'auto' with --draft-top-k 3: a tree has fixed levels: give 1 to"),
    ):
        code, _, err = run(*DRAFTED, *options)
        assert words in err
        assert code == 2


def test_show_drafts_marks_them_where_there_are_no_colors(run, expected):
    _, out, _ = run(*DRAFTED, "--max-tokens", "40", "--show-drafts")

    legend, body = out.split("\n", 1)
    assert "{+accepted draft+}" in legend
    assert "[-rejected draft-]" in legend
    assert "[-" in body
    assert "{+" in body


def test_show_drafts_colors_them_on_a_terminal(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    _, out, _ = run(*DRAFTED, "--max-tokens", "40", "--show-drafts")

    assert "\x1b[32maccepted draft" in out
    assert "\x1b[2;9;31mrejected draft" in out
    assert "{+" not in out


def test_show_drafts_puts_the_legend_in_front_of_the_prompt():
    out = StringIO()
    view = DraftsView(Console(file=out, color_system=None, soft_wrap=True), "def f")
    view.add([DraftRound(1, 1, [Span("ab", "target"), Span("c", "accepted")])])
    view.end()
    assert out.getvalue() == "{+accepted draft+}  [-rejected draft-]\n\ndef fab{+c+}\n"


def test_charts_without_matplotlib_are_refused_before_anything_is_measured(
    run, monkeypatch, tmp_path
):
    monkeypatch.setattr("specdec.cli.before_torch.find_spec", lambda name: None)
    code, out, err = run("bench", "--charts", str(tmp_path))

    assert (code, out) == (2, "")
    assert "charts need matplotlib" in err


def test_the_prompt_may_come_from_a_file_or_from_stdin(run, expected, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    from_file = run("generate", "demo", "--prompt-file", str(file), "--max-tokens", "40")
    monkeypatch.setattr(sys, "stdin", StringIO(PROMPT + "\n"))
    from_stdin = run("generate", "demo", "--max-tokens", "40")

    assert from_file[1] == from_stdin[1] == expected + "\n"


def test_stop_cuts_the_text(run, expected):
    _, out, _ = run("generate", "demo", PROMPT, "--max-tokens", "40", "--stop", "def")

    assert out == expected[: expected.index("def")] + "\n"


def test_a_drawn_seed_is_reported_and_repeats_the_text(run):
    options = ("--max-tokens", "24", "--temperature", "0.9", "--top-p", "0.95")
    sampled = ("generate", "demo", PROMPT, *options)
    first = json.loads(run(*sampled, "--json")[1])
    again = run(*sampled, "--seed", str(first["seed"]), "--draft", "demo", "-k", "2")
    other = run(*sampled, "--seed", str((first["seed"] + 1) % 2**64))

    assert again[1] == first["text"] + "\n"
    assert f"seed {first['seed']}" in again[2]
    assert other[1] != again[1]


def test_samples_logprobs_and_the_rule_are_in_the_json(run):
    options = "--temperature 1 --seed 5 -n 3 --logprobs 1 --acceptance block --max-tokens 6 --json"
    result = json.loads(run(*DRAFTED, *shlex.split(options))[1])

    assert (len(result["samples"]), result["seed"], result["acceptance"]) == (3, 5, "block")
    assert len(result["logprobs"]) == len(result["token_ids"]) == 6
    assert result["cumulative_logprob"] < 0
    assert [sample["finish_reason"] for sample in result["samples"]] == ["length"] * 3
    assert [len(sample["logprobs"]) for sample in result["samples"]] == [6, 6, 6]


def test_a_draft_given_as_the_target_is_called_a_draft(run):
    code, out, err = run("generate", str(demo_directory("eagle3")), "x")

    assert (code, out) == (2, "")
    assert "this is an EAGLE draft, no target" in err


@pytest.mark.parametrize("args", [(), ("--json",), ("--show-drafts",)])
def test_a_text_that_ends_in_an_error_is_exit_code_2(run, monkeypatch, args):
    def run_step(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Runner, "run_step", run_step)
    code, out, err = run("generate", "demo", PROMPT, "--draft", "demo", *args)

    assert code == 2
    assert "specdec: error: out of memory in a step of 1 requests" in err
    assert "lower --gpu-memory-utilization or --max-num-seqs (full)\n" in err
    assert json.loads(out)["finish_reason"] == "error" if "--json" in args else not out.strip()


@pytest.mark.parametrize(
    "args, message",
    [
        (("generate", "demo"), "no prompt: standard input is empty"),
        (("chat", "demo", "--chat-template", __file__), "no message: standard input is empty"),
    ],
)
def test_standard_input_may_be_closed(run, monkeypatch, args, message):
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run(*args)

    assert (code, err.startswith(f"specdec: error: {message}")) == (2, True)


@pytest.mark.parametrize(
    "args, message",
    [
        (("generate", "demo", "x", "--temperature", "-1"), "--temperature -1"),
        (("generate", "demo", "x", "--temperature", "1", "--top-p", "0"), "--top-p 0"),
        (
            ("generate", "demo", "x", "--top-p", "0.9"),
            "--top-p 0.9 with --temperature 0, which takes the best token",
        ),
        (("generate", "demo", "x", "--top-p", "1"), "--top-p 1.0 with --temperature 0"),
        (("generate", "demo", "x", "--top-k", "5"), "--top-k 5 with --temperature 0"),
        (("generate", "demo", "x", "--min-p", "0.1"), "--min-p 0.1 with --temperature 0"),
        (("chat", "demo", "--top-k", "5"), "--top-k 5 with --temperature 0"),
        (("chat", "demo", "--chat-template", TENSORS), ".safetensors: no text in UTF-8"),
        (("generate", "demo", "x", "--temperature", "nan"), "--temperature nan"),
        (
            ("generate", "demo", "x", "--max-model-len", str(2**70)),
            "--max-model-len 1180591620717411303424",
        ),
        (("verify", "demo", "demo", "-k", "99"), "--num-speculative-tokens 99"),
        (("verify", "demo", "demo", "--device", "tpu"), "--device 'tpu': give auto"),
        (("generate", "demo", "x", "-n", "2"), "--n 2 with --temperature 0"),
        (("generate", "demo", "x", "--acceptance", "block"), "give --draft too"),
        (
            ("generate", "demo", "x", "--draft", "demo", "--acceptance", "typical"),
            "--acceptance 'typical'",
        ),
        (("generate", "demo", "x", "-k", "3"), "give --draft too"),
        (("generate", "./nowhere", "x"), "no such directory"),
        (("generate", "demo", "x", "--draft", "./nowhere"), "no such directory"),
        (("generate", "demo", "x", "--max-tokens", "0"), "--max-tokens 0"),
        (("generate", "demo", "x", "--logprobs", "2"), "--logprobs 2 without --json"),
        (("generate", "demo", "caf\udce9"), "character 3 is no Unicode text"),
        (("generate", "demo", "x", "--dtype", "int8"), "allowed are auto, float32"),
        (("generate", "demo", "x", "--prompt-file", __file__), "give one of them"),
        (("generate", "demo", "--prompt-file", TENSORS), ".safetensors: no text in UTF-8"),
        (
            ("generate", "demo/eagle3", "x"),
            "the bundled pair has no such target (allowed: demo, demo/target)",
        ),
        (
            ("generate", "demo", "x", "--draft", "demo/eagle2"),
            "(allowed: demo, demo/eagle3, demo/eagle1, demo/dspark)",
        ),
        (("bench", "--batch", "0"), "--batch 0: give numbers of at least 1"),
        (
            ("bench", "-k", "3,40"),
            "--num-speculative-tokens 3,40: give numbers of at least 0, at most 32",
        ),
        (("bench", "--json", "/nosuch/run.json"), "there is no directory /nosuch"),
        (("bench", "--json", "/"), "--json /: a directory; give a file"),
        (("bench", "--prompts", __file__), "give JSON"),
        (("bench", "--dtype", "int8"), "--dtype 'int8': allowed are auto, float32"),
        (("bench", "--device", "tpu"), "--device 'tpu': give auto, cpu"),
        (
            ("bench", "--batch", str(2**70)),
            "--batch 1180591620717411303424: give numbers of at least 1, at most 4096",
        ),
        (
            ("bench", "demo/target", "-k", "3"),
            "--num-speculative-tokens 3 without a draft: give --draft too",
        ),
        (
            ("bench", "demo/target", "--suite", "trees", "--trees", "6x4x3"),
            "--trees without a draft: give --draft too",
        ),
        (
            ("bench", "--contexts", "70"),
            "--contexts 70 is for the suites exactness, context: give one of them too",
        ),
        (("chat", "demo", "-k", "3"), "give --draft too"),
        (("chat", "demo", "--temperature", "-1"), "--temperature -1"),
        (("inspect", "./nowhere"), "no such directory"),
        (("verify", "demo", "demo", "-k", "0"), "-tokens 0: give an integer from 1 to"),
    ],
)
def test_errors_are_one_message_and_exit_code_2(run, args, message):
    code, out, err = run(*args)

    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("specdec: error: ")
    assert message in err
    assert "Traceback" not in err


def test_chat_without_a_template_says_how_to_give_one(run, bare_target):
    code, _, err = run("chat", str(bare_target))

    words = "its tokenizer has no chat template: give --chat-template FILE"
    assert (code, words in err) == (2, True)


def test_chat_takes_the_template_of_another_tokenizer(run, bare_target, monkeypatch):
    answers = []
    for target in (("demo",), (str(bare_target), "--tokenizer", "demo")):
        monkeypatch.setattr(sys, "stdin", StringIO(PROMPT))
        answers.append(run("chat", *target, "--max-tokens", "8")[:2])

    assert answers[0] == answers[1]
    assert answers[0][0] == 0
    assert answers[0][1].strip()


def test_a_checkpoint_error_is_a_message_too(run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    code, _, err = run("generate", str(tmp_path), "x")

    assert code == 2
    assert "nothing loaded" in err


@pytest.mark.parametrize(
    "options, words",
    [
        (
            ["--cuda-graph-sizes", "1;2"],
            "--cuda-graph-sizes 1;2: give integers with commas between them",
        ),
        (
            ["--cuda-graph-sizes", "1,2"],
            "--cuda-graph-sizes [1, 2]: 2 is not an integer from 1 to 1",
        ),
        (
            ["--cuda-graph-token-sizes", "64"],
            "--cuda-graph-token-sizes [64], but graphs are captured on a GPU only",
        ),
        (["--enforce-eager", "--cuda-graph-sizes", "1"], "--enforce-eager captures nothing"),
    ],
)
def test_graph_options_are_refused_by_name(run, options, words):
    code, _, err = run("generate", "demo", "x", "--device", "cpu", *options)

    assert code == 2
    assert words in err


def test_enforce_eager_is_what_a_cpu_does_anyway(run):
    options = ("--device", "cpu", "--max-tokens", "4", "--enforce-eager")
    code, out, _ = run("generate", "demo", "def", *options)

    assert code == 0
    assert out


@pytest.mark.parametrize("args", [(), ("--no-prefix-caching",)])
def test_prefix_caching_may_be_left_out(run, monkeypatch, args):
    options: list[object] = []
    real = LLM.__init__

    def build(self: LLM, *given: object, **more: object) -> None:
        options.append(more["enable_prefix_caching"])
        real(self, *given, **more)

    monkeypatch.setattr(LLM, "__init__", build)
    assert run("generate", "demo", "def", "--max-tokens", "2", *args)[0] == 0
    assert options == [not args]


def test_specdec_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    with pytest.raises(ValueError, match="no such directory"):
        main(["generate", "./nowhere", "x"])


def test_specdec_log_refuses_unknown_levels(run, monkeypatch):
    monkeypatch.setenv("SPECDEC_LOG", "loud")
    code, _, err = run("inspect", "demo")

    assert code == 2
    assert "SPECDEC_LOG='loud'" in err


@pytest.mark.parametrize(
    "name, role, format, num_tensors",
    [
        ("demo", "target", "llama", 74),
        ("demo/eagle3", "draft", "eagle-3", 15),
        ("demo/eagle1", "draft", "eagle-1", 11),
        ("demo-dspark", "draft", "specforge-dspark", 40),
    ],
)
def test_inspect_names_format_fields_and_tensors(run, name, role, format, num_tensors):
    code, text, _ = run("inspect", name)
    result = json.loads(run("inspect", name, "--json")[1])

    assert code == 0
    assert (result["role"], result["format"], len(result["tensors"])) == (role, format, num_tensors)
    assert all(row["source"] for row in result["fields"])
    shown = re.sub(r"\{0\.\.\d+\}", "N", text)
    for tensor in result["tensors"]:
        name = tensor["name"]
        assert name in shown or re.sub(r"layers\.\d+\.", "layers.N.", name) in shown


def test_inspect_with_a_target_resolves_the_taps(run):
    fields = json.loads(run("inspect", "demo/eagle3", "--target", "demo", "--json")[1])["fields"]

    assert [row["value"] for row in fields if row["field"] == "aux_boundaries"] == [[2, 4, 5]]


def test_verify_says_that_the_demo_drafts_work(run):
    code, out, _ = run("verify", "demo", "demo", "--max-tokens", "24")

    assert code == 0
    assert "the draft works" in out
    assert "public" in out
    assert max(map(len, out.splitlines())) <= 60


def test_verify_json_has_agreement_per_position(run):
    _, out, _ = run("verify", "demo", "demo/eagle1", "-k", "3", "--max-tokens", "24", "--json")
    result = json.loads(out)

    assert result["works"] is True
    assert len(result["agreement"]) == 3
    assert result["agreement"][0] > 0.5
    assert result["num_repeated"] == result["num_agreeing"][0] > 50


@pytest.mark.parametrize(
    "name, break_tensor",
    [("lm_head.weight", "flip"), pytest.param("fc.weight", "zero_", marks=pytest.mark.slow)],
)
def test_verify_warns_of_a_broken_draft(run, tmp_path, name, break_tensor):
    draft = _broken_draft(tmp_path, name, break_tensor)
    code, out, _ = run("verify", "demo", str(draft), "--max-tokens", "24")

    assert code == 1
    assert "WARNING: the draft does not work" in out
    assert "taps off by one" in out


def _broken_draft(tmp_path: Path, name: str, break_tensor: str) -> Path:
    """A copy of the demo head with one tensor flipped or zeroed: it loads, and never agrees."""
    draft = tmp_path / "draft"
    shutil.copytree(demo_directory("eagle3"), draft)
    tensors = load_file(draft / "model.safetensors")
    tensor = tensors[name]
    tensors[name] = tensor.flip(0).contiguous() if break_tensor == "flip" else tensor.zero_()
    save_file(tensors, draft / "model.safetensors")
    return draft


@pytest.mark.slow  # requests/test_chat_template.py shows it too
def test_verify_stops_a_chat_template_that_hangs(run, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(demo_directory("target"), target)
    hangs = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (target / "chat_template.jinja").write_text(hangs)
    code, out, err = run("verify", str(target), "demo")

    assert (code, out) == (2, "")
    assert "the chat template does not take these messages: it was stopped after 2 s" in err


def test_a_chat_template_that_is_no_text_is_named(run, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_bytes(b"\xff")
    _, _, err = run("chat", "demo", "--chat-template", str(file))
    assert f"--chat-template {file}: no text in UTF-8" in err


@pytest.mark.slow
def test_verify_asks_questions_where_the_template_tells_roles_apart(run, tmp_path, monkeypatch):
    target = tmp_path / "target"
    shutil.copytree(demo_directory("target"), target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    asked: list[object] = []
    real = LLM.generate

    def generate(self: LLM, prompts: list[object], *args: object) -> object:
        asked.append(prompts)
        return real(self, prompts, *args)

    monkeypatch.setattr(LLM, "generate", generate)
    run("verify", str(target), "demo", "--max-tokens", "24")
    run("verify", "demo", "demo", "--max-tokens", "24")

    assert [len(asked[0]), asked[2]] == [len(QUESTIONS), list(CODE_STARTS)]
    assert all(isinstance(prompt, list) for prompt in asked[0])
