"""Each example runs as its docstring says, and shows what it claims."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from specdec.cli import main
from tests.demo_server import demo_server
from tests.served import free_port

ROOT = Path(__file__).parent.parent
EXPECTED = {
    "chat.py": ("> class Stack(object):", "(64 of "),
    "stream.py": ("class Config(object):", "tokens of each piece: 1 "),
    "async_many.py": ("short: 16 tokens, ended by length", "ended by abort"),
    "compare_drafts.py --max-tokens 8": ("demo/eagle1", "demo-dspark", "gave the same texts: True"),
    "sampling_seeds.py": (
        "same text: True",
        "another text:         True",
        "no text:                 True",
    ),
}
# of a server that runs already
CLIENTS = {
    "openai_client.py": ("drafts accepted: ", "pieces of the stream: ", "same text: True"),
    "structured.py": ("Shirt(size=", "colour='"),
}
OTHERS = {"ray_serve.py", "curl.sh", "batch.jsonl"}


def test_every_example_is_tried():
    files = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert files == {command.split()[0] for command in EXPECTED} | set(CLIENTS) | OTHERS


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=pytest.mark.slow) if each == "sampling_seeds.py" else each
        for each in EXPECTED
    ],
)
def test_an_example_shows_what_it_claims(command, monkeypatch, capsys):
    out = _run_here(command, monkeypatch, capsys)
    assert [words for words in EXPECTED[command] if words not in out] == []
    assert "False" not in out


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve the bundled pair; the examples' own docstrings start a server by `specdec serve`."""
    with demo_server() as found:
        yield found


@pytest.mark.parametrize("name", CLIENTS)
def test_an_example_of_a_client_shows_what_it_claims(name, url, monkeypatch, capsys):
    out = _run_here(f"{name} --url {url}/v1", monkeypatch, capsys)
    assert [words for words in CLIENTS[name] if words not in out] == []


def _run_here(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """What a script prints, run as `python` runs it, but in this process, which has torch."""
    name, *options = command.split()
    file = f"{ROOT}/examples/{name}"
    monkeypatch.setattr(sys, "argv", [file, *options])
    runpy.run_path(file, run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", EXPECTED)
def test_an_example_runs_as_a_process(command):
    name, *options = command.split()
    run = [sys.executable, f"examples/{name}", *options]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, env=_with_sources())
    assert done.returncode == 0, done.stderr[-2000:]
    assert [words for words in EXPECTED[command] if words not in done.stdout] == []


def test_the_example_of_curl(url):
    run = ["bash", "examples/curl.sh", url]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, env=_with_sources())
    assert done.returncode == 0, done.stdout + done.stderr
    completion, *stream, chat, guided = [line for line in done.stdout.splitlines() if line]
    assert stream.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in stream]
    assert len(chunks) > 1
    text = json.loads(completion)["choices"][0]["text"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert json.loads(chat)["choices"][0]["message"]["content"]
    assert 0 < int(json.loads(guided)["choices"][0]["text"]) < 100


def test_the_example_of_a_batch_file(tmp_path):
    output = tmp_path / "out.jsonl"
    with pytest.raises(SystemExit) as left:
        main(["batch", f"{ROOT}/examples/batch.jsonl", str(output), "demo", "--draft", "demo"])
    assert left.value.code == 0
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == ["greedy", "seeded", "chat", "choice"]
    assert [each["response"]["status_code"] for each in answers] == [200] * 4
    assert answers[3]["response"]["body"]["choices"][0]["text"] in ("True", "False")


@pytest.mark.fleet
def test_the_example_of_ray_serve(tmp_path):
    if find_spec("ray") is None:
        pytest.fail('ray is missing: pip install -c constraints.txt -e ".[test-fleet]"')
    key = tmp_path / "key"
    key.write_text("0" * 64)
    port = free_port()
    run = [sys.executable, "examples/ray_serve.py", "--once", "--port", str(port)]
    env = _with_sources() | {"RAY_AUTH_TOKEN_PATH": str(key)}
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"2 engines at http://127.0.0.1:{port}/v1" in done.stdout
    assert "    " in done.stdout.partition("2 engines")[0]


def _with_sources() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}
