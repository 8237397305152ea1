"""What a server answers while the process of its engine is stopped, and for how long it waits."""

import os
import signal
import time

import httpx2
import pytest

from specdec.serve.async_engine import SILENT_SECONDS

PATIENCE = SILENT_SECONDS + 10  # for a beat, a look and a busy machine


def seconds_until(condition, most):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < most
        time.sleep(0.1)
    return time.monotonic() - began


@pytest.mark.slow
def test_a_stopped_engine_is_a_503_within_seconds_and_a_200_once_it_goes_on(serve, capsys):
    with serve(is_apart=True) as live:
        assert live.completion("def f(", max_tokens=2)["choices"]
        time.sleep(SILENT_SECONDS + 3)
        assert live.get("/health").status_code == 200  # idle
        pid = live.llm._host._process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            metrics = live.get("/metrics", timeout=PATIENCE)
            waited = time.monotonic() - began
            health = seconds_until(lambda: live.get("/health").status_code == 503, PATIENCE)
            for _ in range(3):  # no wait from now on
                asked = time.monotonic()
                assert live.get("/metrics", timeout=5).status_code == 503
                found = live.post("/v1/completions", {"prompt": "a"}, timeout=5)
                assert (found.status_code, time.monotonic() - asked < 2) == (503, True)
            assert "has made no progress" in found.json()["error"]["message"]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert metrics.status_code == 503
        seconds_until(lambda: live.get("/health").status_code == 200, 10)
        assert live.completion("def f(", max_tokens=2)["choices"]
        assert live.get("/metrics").status_code == 200
    with capsys.disabled():
        print(f"\n/metrics waited {waited:.1f} s, then /health was 503 after {health:.1f} s")


@pytest.mark.slow
def test_stopped_for_a_moment_an_engine_loses_no_request(serve):
    with serve(is_apart=True) as live:
        pid = live.llm._host._process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(httpx2.TimeoutException):
                live.post("/v1/completions", {"prompt": "a"}, timeout=3)
            assert live.get("/health").status_code == 200
        finally:
            os.kill(pid, signal.SIGCONT)
        assert live.completion("def f(", max_tokens=2)["choices"]
