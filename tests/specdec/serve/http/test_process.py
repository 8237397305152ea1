"""`specdec serve` as a process: the commands of docs/server.md, its output, and its end."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import httpx2
import pytest

from specdec.cli import main

ROOT = Path(__file__).parents[4]
DOCUMENT = (ROOT / "docs/server.md").read_text()
COLUMNS = 60
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": str(COLUMNS)}
ENV["PYTHONPATH"] = os.pathsep.join([str(ROOT), ENV.get("PYTHONPATH", "")])


class Process:
    """A server in a process of its own, on a free port."""

    def __init__(self, command: str, *more: str) -> None:
        words = [sys.executable, "-m", *command.split(), "--port", "0", *more]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV, cwd=ROOT
        )
        self.lines: list[str] = []
        self.url = self._wait_for_url()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _wait_for_url(self) -> str:
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            found = re.search(r"serving .* at (http://\S+)/v1", line)
            if found:
                return found[1]
        raise AssertionError("\n".join(self.lines))

    def _read(self) -> None:
        self.lines += [line.rstrip("\n") for line in self.process.stderr]

    def end(self) -> int:
        """Its exit code."""
        code = self.process.wait(60)
        self._reader.join()
        return code


def commands(start: str) -> list[str]:
    """The document's lines that begin so."""
    return [line for line in DOCUMENT.splitlines() if line.startswith(start)]


@pytest.mark.slow  # test_documents runs them too, in this process
def test_the_commands_of_the_document_work(tmp_path, capsys):
    """The server is a process; its clients run in this one, which has their modules."""
    [command] = commands("specdec serve")
    server = Process(command)
    try:
        found = httpx2.post(
            f"{server.url}/v1/completions", json={"prompt": "def f(x):"}, timeout=60
        )
        assert found.status_code == 200
        assert time.monotonic() - server.began < 60

        [curl] = commands("curl")
        body = re.search(r"--json '(.*)'", curl)[1]
        assert json.loads(body)["temperature"] == 0  # at 1 a small model writes noise
        path = re.search(r"127\.0\.0\.1:8000(\S+)", curl)[1]
        headers = {"Content-Type": "application/json"}
        found = httpx2.post(server.url + path, content=body, headers=headers, timeout=60)
        assert found.json()["choices"][0]["text"]

        code = re.search(r"^```python\n(from openai.*?)^```", DOCUMENT, re.M | re.S)[1]
        exec(code.replace("http://127.0.0.1:8000", server.url), {})
        assert len(capsys.readouterr().out) > 20

        [bench] = commands("specdec bench serve")
        fewer = ["--num-requests", "4", "--max-tokens", "8"]
        words = bench.replace("http://127.0.0.1:8000", server.url).split()
        has_charts = find_spec("matplotlib") is not None
        charts = ["--charts", str(tmp_path)] if has_charts else []
        with pytest.raises(SystemExit) as left:
            main([*words[1:], *fewer, *charts])
        assert left.value.code in (0, None)
        assert "time to first token" in capsys.readouterr().out
        assert bool(list(tmp_path.glob("*.png"))) == has_charts
    finally:
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
    assert server.process.stdout.read() == ""
    assert f"playground: {server.url}/" in server.lines
    [printed] = [line for line in server.lines if "--json" in line]
    assert json.loads(re.search(r"--json '(.*)'", printed)[1])["temperature"] == 0


@pytest.mark.slow
def test_after_sigterm_running_answers_finish_and_new_ones_get_503():
    formats = ("--tool-call-parser", "hermes", "--reasoning-parser", "think")
    server = Process("specdec serve demo --draft demo", "--max-model-len", "512", *formats)
    try:
        assert "calls of tools are read as hermes" in server.lines
        assert "text in <think> is read as reasoning" in server.lines
        lines = [line for line in server.lines if "curl" not in line]
        assert [line for line in lines if len(line) > COLUMNS] == []
        stop = partial(server.process.send_signal, signal.SIGTERM)
        answers, refused, health = asyncio.run(_load_and_stop(server.url, stop, 60))
        assert server.end() == 0
    finally:
        server.process.kill() if server.process.poll() is None else None
    _check_stopped(answers, refused, health, 60)
    assert not any("Traceback" in line for line in server.lines), server.lines


def test_while_a_server_drains_running_answers_finish_and_new_ones_get_503(serve):
    with serve() as live:
        found = asyncio.run(_load_and_stop(live.url, live.drain, 40))
    _check_stopped(*found, 40)


def _check_stopped(answers, refused, health, num_tokens):
    assert [each.status_code for each in answers] == [200] * len(answers)
    for each in answers:
        assert each.json()["usage"]["completion_tokens"] == num_tokens
    assert refused.status_code == health.status_code == 503
    assert refused.json()["error"]["message"] == "the server is shutting down"


async def _load_and_stop(url, stop, num_tokens):
    """Answers that ran when `stop` was called, and what a new connection was told after it."""
    body = {"prompt": "def f(x):", "max_tokens": num_tokens, "ignore_eos": True}
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        running = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(6)]
        async with asyncio.timeout(30):
            while (
                'num_requests_running{model_name="demo"} 6'
                not in (await client.get("/metrics")).text
            ):
                await asyncio.sleep(0.01)
        stop()
        await asyncio.sleep(0.2)
        async with httpx2.AsyncClient(base_url=url) as other:  # a new connection
            refused = await other.post("/v1/completions", json=body)
            health = await other.get("/health")
        assert not any(task.done() for task in running)
        answers = await asyncio.gather(*running)
    return answers, refused, health


@pytest.mark.slow
def test_what_outlasts_the_timeout_is_ended_and_the_exit_code_is_0():
    server = Process("specdec serve demo", "--shutdown-timeout", "0.2", "--log-format", "json")
    body = {"prompt": "def f(x):", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert '"the server is shutting down"' in rest[-4]
    assert server.end() == 0
    assert any(line.startswith('{"time": ') for line in server.lines)


def test_what_outlasts_the_timeout_is_ended(serve):
    body = {"prompt": "def f(x):", "max_tokens": 450, "ignore_eos": True, "stream": True}
    with (
        serve(shutdown_timeout=0.2) as live,
        httpx2.stream("POST", live.url + "/v1/completions", json=body, timeout=60) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        live.drain()
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert '"the server is shutting down"' in rest[-4]


def test_a_server_whose_engine_was_killed_says_so_and_ends_with_1():
    server = Process("specdec serve demo", "--max-model-len", "128", "--max-num-seqs", "2")
    try:
        pid = server.process.pid
        [engine] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert httpx2.get(f"{server.url}/health").status_code == 200
        os.kill(int(engine), signal.SIGKILL)
        end = time.monotonic() + 20
        while httpx2.get(f"{server.url}/health").status_code == 200 and time.monotonic() < end:
            time.sleep(0.01)
        found = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=20)
        assert found.status_code == 503
        assert "status -9" in found.json()["error"]["message"]
    finally:
        server.process.send_signal(signal.SIGTERM)
    assert server.end() == 1
    assert any("status -9" in line for line in server.lines)


def test_an_engine_that_was_shut_down_is_not_a_lost_one(serve):
    with serve() as live:

        async def twice():
            live.server.drain()
            live.llm.shutdown()
            live.server.drain()  # a second signal

        live.run(twice())
    assert not live.server.has_lost_engine
