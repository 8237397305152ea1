"""`specdec batch`: every line once, in order, whatever happens, with the texts of LLM.generate."""

import codecs
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specdec import LLM, SamplingParams
from specdec.cli.batch import MOST_LINE, Batch, opened, read_lines
from specdec.engine import Engine
from specdec.requests.request import Request
from specdec.serve.http.batch import answer_problem, begins_answer, read_line

ROOT = Path(__file__).parents[3]
ENGINE = ("demo", "--draft", "demo", "--device", "cpu", "--max-model-len", "512")
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
ENV["PYTHONPATH"] = os.pathsep.join([str(ROOT), ENV.get("PYTHONPATH", "")])
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def request(number: int, **fields: object) -> dict:
    """A line that works: sampled text, every third one by the chat route."""
    body = {"temperature": 0.8, "seed": number, "max_tokens": 8 + number % 13, **fields}
    text = f"def f_{number}(x):"
    if number % 3 == 0:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    url = CHAT if number % 3 == 0 else COMPLETION
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def lines_of(count: int) -> tuple[list[str], dict[int, tuple[str, object]]]:
    """Lines with five bad ones, and by place what is wrong with those: the error or status."""
    lines = [json.dumps(request(number)) for number in range(count)]
    third = count // 3
    lines[1] = '{"custom_id": "line-1", "method": "POST", '
    lines[third] = json.dumps({**request(third), "url": "/v1/embeddings"})
    lines[third + 1] = json.dumps(request(third + 1, temperature=-1))
    lines[third + 2] = json.dumps({**request(third + 2), "custom_id": "line-0"})
    lines[-1] = json.dumps(request(count - 1, tempature=1))
    return lines, {
        1: (None, "the line is no JSON"),
        third: (f"line-{third}", "url='/v1/embeddings'"),
        third + 1: (f"line-{third + 1}", 400),
        third + 2: ("line-0", "custom_id='line-0': line 1 has it too"),
        count - 1: (f"line-{count - 1}", 400),
    }


def check(output: Path, lines: list[str], bad: dict[int, tuple[str, object]]) -> None:
    """Every line once, in order; the texts of an engine without a draft."""
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(found) == len(lines)
    assert len({each["id"] for each in found}) == len(found)
    for place, (name, problem) in bad.items():
        assert found[place]["custom_id"] == name
        if isinstance(problem, int):
            assert found[place]["response"]["status_code"] == problem
            assert found[place]["response"]["body"]["error"]["message"]
        else:
            assert found[place]["response"] is None
            assert problem in found[place]["error"]["message"]
    good = [place for place in range(len(lines)) if place not in bad]
    given = [json.loads(lines[place]) for place in good]
    texts = []
    for place, line in zip(good, given, strict=True):
        response = found[place]["response"]
        assert (found[place]["custom_id"], found[place]["error"]) == (line["custom_id"], None)
        assert (response["status_code"], len(response["request_id"])) == (200, 32)
        [choice] = response["body"]["choices"]
        texts.append(choice["text"] if line["url"] == COMPLETION else choice["message"]["content"])
    assert texts == generated(given)


def generated(given: list[dict]) -> list[str]:
    """What LLM writes for the lines, without a draft."""
    llm = LLM("demo", device="cpu", max_model_len=512)
    names = ("temperature", "seed", "max_tokens")
    params = [SamplingParams(**{name: each["body"][name] for name in names}) for each in given]
    prompts = [
        each["body"]["prompt"]
        if each["url"] == COMPLETION
        else {
            "prompt_token_ids": llm.get_tokenizer().apply_chat_template(
                each["body"]["messages"], add_generation_prompt=True, return_dict=False
            )
        }
        for each in given
    ]
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


def start_and_kill(source: Path, output: Path, num_lines: int) -> None:
    """A run in a process of its own, killed once some lines are written."""
    command = [sys.executable, "-m", "specdec", "batch", str(source), str(output), *ENGINE]
    with subprocess.Popen(
        [*command, "--max-num-seqs", "2"], env=ENV, cwd=ROOT, stderr=subprocess.PIPE
    ) as process:
        end = time.monotonic() + 60
        while not output.exists() or output.read_bytes().count(b"\n") < num_lines:
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < end
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("count", [16, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_and_every_line_is_there_once(run, tmp_path, count):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines, bad = lines_of(count)
    source.write_text("\n".join(lines) + "\n")
    start_and_kill(source, output, count // 4)
    before = output.read_bytes()
    num_whole = before.count(b"\n")
    assert count // 4 <= num_whole < count
    output.write_bytes(before + b'{"id": "batch_req_0", "custom_')  # as if killed while writing

    code, out, err = run("batch", str(source), str(output), *ENGINE)
    assert (code, out) == (0, "")
    assert f"{num_whole} of {count} lines are done" in err
    assert f"{count} of {count} lines in " in err
    assert output.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    check(output, lines, bad)

    whole = output.read_bytes()
    code, _, err = run("batch", str(source), str(output), *ENGINE)  # loads nothing
    assert (code, output.read_bytes()) == (0, whole)
    assert "target llama" not in err


def test_lines_that_are_no_requests_are_error_lines(run, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = request(1)
    bad = {
        "the line is no JSON object": [1],
        "custom_id=None: give a string": {key: good[key] for key in ("method", "url", "body")},
        "method='GET': give POST": {**good, "method": "GET"},
        "unknown 'extra'": {**good, "extra": 1},
        "body='x': give the JSON object of a request": {**good, "body": "x"},
        "stream: a batch has whole answers": request(1, stream=True),
    }
    lines = [
        {**each, "custom_id": str(i)} if isinstance(each, dict) and "custom_id" in each else each
        for i, each in enumerate(bad.values())
    ]
    source.write_bytes(b"\n\xff\n" + "\n\n".join(map(json.dumps, lines)).encode())
    code, _, err = run("batch", str(source), str(output), *ENGINE)
    assert code == 0
    assert f"7 of 7 lines in {output}, 7 of this run's with errors" in err
    found = [json.loads(line)["error"]["message"] for line in output.read_text().splitlines()]
    assert "the line is no JSON in UTF-8" in found[0]
    for message, wanted in zip(found[1:], bad, strict=True):
        assert wanted in message


@pytest.mark.parametrize(
    "given, words",
    [
        ('{"custom_id": "other"}\n', "line 1 answers no line 1 of"),
        ('{"id": 1, "custom_id": "other", "response": null, "error": null}\n', "line 1 answers no"),
        ("no JSON\n", "line 1 answers no line 1"),
    ],
)
def test_an_output_of_another_batch_is_left_as_it_is(run, tmp_path, given, words):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(request(1)) + "\n")
    output.write_text(given)
    code, _, err = run("batch", str(source), str(output), *ENGINE)
    assert (code, err.count("\n"), output.read_text()) == (2, 1, given)
    assert words in err


ANSWER = b'{"id":"batch_req_0f","custom_id":"line-%d","response":null,"error":null}'
FOREIGN = {
    "a note": b"mine",
    "an object": b'{"mine": 1}',
    "a brace": b"{",
    "the beginning of an object with an id": b'{"id":"',
    "an answer of another server": b'{"id": "batch_req_wnaDys", "custom_id": "line-1", "respo',
    "an answer to another line": b'{"id":"batch_req_0f","custom_id":"line-2","response":{"st',
    "an object that only begins as an answer": b'{"id":"batch_req_0f","custom_id":"line-1"}',
    "deeply nested JSON": b'{"a":' * 100_000,
    "deeply nested JSON on a line": b'{"a":' * 100_000 + b"\n",
    "zeros": bytes(1000),
    "an answer and a note": ANSWER % 1 + b"\nmine",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_never_written_to(run, tmp_path, kind):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(request(number)) for number in (1, 2)))
    output.write_bytes(FOREIGN[kind])
    code, _, err = run("batch", str(source), str(output), "demo", "--device", "cpu")
    assert (code, err.count("\n"), output.read_bytes()) == (2, 1, FOREIGN[kind])
    assert f"answers no line {2 if 'and a note' in kind else 1} of {source}" in err


@pytest.mark.parametrize("name", ["line-1", "q\\u00e9, \\u2028: \\ud800"])
def test_every_beginning_of_an_answer_is_known(name):
    line = read_line(json.dumps({**request(1), "custom_id": json.loads(f'"{name}"')}).encode())
    whole = answer_problem(line).line
    first = len(b'{"id":"batch_req_')
    assert all(begins_answer(whole[:end], line) for end in range(first, len(whole)))
    other = read_line(json.dumps({**request(1), "custom_id": "line-10"}).encode())
    assert not begins_answer(whole, other)


def test_an_answer_without_its_line_break_is_kept(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(request(number)) for number in (1, 2, 4)))
    output.write_bytes(ANSWER % 1 + b"\n" + ANSWER % 2)
    with opened(source, output) as stream:
        assert Batch(source, output, stream).num_done == 2
    assert output.read_bytes() == ANSWER % 1 + b"\n" + ANSWER % 2 + b"\n"
    output.write_bytes(ANSWER % 1 + b'\n{"id"')
    with opened(source, output) as stream:
        assert Batch(source, output, stream).num_done == 1
    assert output.read_bytes() == ANSWER % 1 + b"\n"


def test_a_byte_order_mark_and_a_line_of_megabytes(tmp_path):
    source = tmp_path / "in.jsonl"
    lines = [json.dumps(request(number)).encode() for number in (1, 2)]
    long = b'{"a": "' + b"x" * MOST_LINE + b'"}'
    source.write_bytes(codecs.BOM_UTF8 + lines[0] + b"\n" + long + b"\n" + lines[1])
    found = list(read_lines(source))
    assert [line.custom_id for line in found] == ["line-1", None, "line-2"]
    assert [line.problem for line in found] == [None, "the line is longer than 32 MiB", None]
    source.write_bytes(codecs.BOM_UTF8 + b"\n" + lines[0])
    assert [line.custom_id for line in read_lines(source)] == ["line-1"]


@pytest.mark.parametrize("kind", ["FIFO", "device"])
@pytest.mark.parametrize("place", ["IN", "OUT"])
def test_a_pipe_or_a_device_is_one_line(run, tmp_path, kind, place):
    files = {"IN": tmp_path / "in.jsonl", "OUT": tmp_path / "out.jsonl"}
    files["IN"].write_text(json.dumps(request(1)) + "\n")
    files[place].unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(files[place])
    else:
        files[place].symlink_to("/dev/zero")
    code, out, err = run("batch", str(files["IN"]), str(files["OUT"]), *ENGINE)
    wanted = f"{files[place]}: a pipe or a device, a regular file is needed"
    assert (code, out, err) == (2, "", f"specdec: error: {wanted}\n")


def test_mistakes_are_one_line(run, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(request(1)) + "\n")
    (tmp_path / "jinja").write_text("{% for m in messages %}")
    for args, words in (
        ((source, source), "is the input too"),
        ((tmp_path / "none", output), "does not exist"),
        ((source, tmp_path / "none" / "out"), "No such file"),
        ((source, output, "--generation-config", "x"), "--generation-config x: allowed are"),
        ((source, output, "-k", "3"), "without a draft"),
        ((source, output, "--chat-template", tmp_path / "jinja"), "--chat-template is no valid"),
        ((source, output, "--num-engines", "2"), "--num-engines 2 without a cluster: give --ray"),
    ):
        files, more = map(str, args[:2]), map(str, args[2:])
        code, out, err = run("batch", *files, "demo", *more)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err
    with output.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, _, err = run("batch", str(source), str(output), *ENGINE)
    assert (code, err.count("\n")) == (2, 1)
    assert "another process is writing it" in err


def spy_on_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Holds the most requests that ran in one step."""
    most = [0]
    step = Engine.step

    def counted(engine: Engine) -> list[Request]:
        most[0] = max(most[0], len(engine.scheduler.running))
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)
    return most


def test_an_engine_that_fails_ends_the_run_and_no_line_is_lost(run, tmp_path, monkeypatch):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps(request(number, max_tokens=20)) for number in range(1, 9)]
    source.write_text("\n".join(lines))
    steps = []

    def fail(*_: object) -> None:
        steps.append(1)
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr("specdec.engine.Engine.step", fail)
        code, _, err = run("batch", str(source), str(output), *ENGINE)
    assert steps
    assert code == 2
    assert "planted" in err
    assert "0 of 8 lines" in err
    assert "the same command goes on" in err
    most = spy_on_steps(monkeypatch)
    code, _, err = run("batch", str(source), str(output), *ENGINE)
    assert (code, most) == (0, [8])  # all at once
    check(output, lines, {})


def test_without_ray_the_error_says_how_to_install_it(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "specdec.fleet", raising=False)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(request(1)) + "\n")
    code, out, err = run("batch", str(source), str(output), *ENGINE, "--ray", "local")
    assert (code, out, err.count("\n"), output.exists()) == (2, "", 1, False)
    install = 'pip install "specdec[ray]"'
    assert "batch --ray needs ray" in err
    assert err.endswith(install + "\n")
    with pytest.raises(ModuleNotFoundError) as refused:
        import specdec.fleet  # noqa: F401
    assert str(refused.value) == f"specdec.fleet needs ray: {install}"
