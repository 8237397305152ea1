"""Under load every answer is that of LLM.generate, also while other clients leave."""

import asyncio
import json
import random
import socket
from contextlib import aclosing

import httpx2
import pytest

from tests.specdec.serve.http.load import (
    aborted,
    events,
    expected_of,
    guided_job_of,
    job_of,
    run_all,
)


def check_load(live, jobs, at_a_time):
    """Send all; a fifth of the clients leave."""
    expected = expected_of(jobs)
    live.until_idle()
    num_aborted = aborted(live)
    leaving = set(random.Random(1).sample(range(len(jobs)), len(jobs) // 5))

    found = run_all(live.url, jobs, leaving, at_a_time)

    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if i not in leaving:
            assert ours == theirs, f"request {i}: {jobs[i]}"
    live.until_idle()
    assert live.server.application.traffic.num_requests == 0
    # streams whose first chunk was read; the other requests may have ended before they began
    num_begun = sum(jobs[i].streams for i in leaving)
    assert aborted(live) - num_aborted >= num_begun > len(jobs) // 20


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_answers_under_load_are_those_of_generate_while_others_leave(live, prompts, count):
    chance = random.Random(16)
    check_load(live, [job_of(chance, prompts) for _ in range(count)], at_a_time=64)


@pytest.mark.parametrize("count", [16, pytest.param(200, marks=pytest.mark.slow)])
def test_an_engine_in_another_process_answers_the_same(serve, prompts, count):
    chance = random.Random(18)
    with serve(is_apart=True) as live:
        jobs = [(guided_job_of if i % 8 == 0 else job_of)(chance, prompts) for i in range(count)]
        check_load(live, jobs, at_a_time=64)


@pytest.mark.slow  # test_an_engine_in_another_process_answers_the_same has guided ones, too
@pytest.mark.parametrize("count", [18, 600])
def test_guided_answers_under_load_are_those_of_generate_while_others_leave(live, prompts, count):
    chance = random.Random(17)
    jobs = [(guided_job_of if i % 3 == 0 else job_of)(chance, prompts) for i in range(count)]
    kinds = {kind for job in jobs if job.case for kind in job.case}
    assert kinds == {"json", "regex", "choice", "grammar"}
    check_load(live, jobs, at_a_time=32)


def test_a_client_that_leaves_a_list_of_prompts_aborts_all_of_them(live, prompts):
    live.until_idle()
    num_aborted = aborted(live)
    starts = [ids[:60] for ids in prompts[:6]]
    body = {"prompt": starts, "max_tokens": 400, "ignore_eos": True, "n": 2, "seed": 1}

    async def leave_when_all_have_begun():
        seen = set()
        async with (
            httpx2.AsyncClient(base_url=live.url, timeout=60) as client,
            aclosing(events(client, {**body, "stream": True})) as chunks,
        ):
            while len(seen) < 12:
                seen.add((await anext(chunks))["choices"][0]["index"])

    asyncio.run(leave_when_all_have_begun())

    live.until_idle()
    assert aborted(live) - num_aborted == 12


def test_a_client_that_reads_nothing_holds_up_no_other(live):
    host, port = live.url.removeprefix("http://").split(":")
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 8}
    data = json.dumps({**body, "logprobs": 20}).encode()
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        silent.connect((host, int(port)))
        silent.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + data)
        for _ in range(3):
            assert live.completion("def f(", max_tokens=4)["choices"]
    live.until_idle()
