"""Under load every answer is that of LLM.generate, also while other clients leave."""

import asyncio
import json
import random
import socket
from contextlib import aclosing

import httpx2
import pytest

from specdec import LLM, SamplingParams

NUM_REQUESTS = 200
AT_A_TIME = 64
NUM_LEAVING = NUM_REQUESTS // 5
SAMPLING = {
    "temperature": (0.0, 0.3, 1.0, 1.5),
    "top_p": (0.5, 0.9),
    "top_k": (1, 5, 40),
    "min_p": (0.05,),
    "stop": ("\n\n", ["return", ":"]),
    "logit_bias": ({"5": 3.5, "9": -100},),
    "bad_words": (["self", "return x"],),
    "allowed_token_ids": (list(range(60, 900)),),
    "presence_penalty": (0.5,),
    "frequency_penalty": (-0.5,),
    "repetition_penalty": (1.2,),
    "min_tokens": (2,),
    "ignore_eos": (True,),
    "stop_token_ids": ([199],),
    "logprobs": (0, 3),
    "n": (2, 3),
    "speculate": (False,),
    "num_speculative_tokens": (1, 2),
}


def job_of(chance, prompts):
    """A random request: its prompt, its fields, and whether it streams."""
    fields = {"max_tokens": chance.randint(2, 7), "seed": chance.getrandbits(63)}
    for name, values in SAMPLING.items():
        if chance.random() < 0.25:
            fields[name] = chance.choice(values)
    if fields.get("n", 1) > 1 and fields.get("temperature") == 0.0:
        del fields["n"]
    if "speculate" in fields:
        fields.pop("num_speculative_tokens", None)
    ids = chance.choice(prompts)
    prompt = ids[: chance.randint(5, 60)] if chance.random() < 0.7 else "def f(x):\n" * 3
    return prompt, fields, chance.random() < 0.5


@pytest.fixture(scope="module")
def jobs(prompts):
    chance = random.Random(16)
    return [job_of(chance, prompts) for _ in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def expected(jobs):
    """What LLM.generate gives: text, token ids, finish reason and logprobs of each sample."""
    draft = {"model": "demo", "num_speculative_tokens": 3}
    with LLM("demo", draft, device="cpu", max_num_seqs=16, max_model_len=512) as llm:
        params = [params_of(fields) for _, fields, _ in jobs]
        outputs = llm.generate([prompt for prompt, _, _ in jobs], params, use_tqdm=False)
    return [
        [(each.text, each.token_ids, each.finish_reason, logprobs_of(each)) for each in one.outputs]
        for one in outputs
    ]


def params_of(fields):
    bias = fields.get("logit_bias")
    known = {"logit_bias": {int(key): value for key, value in bias.items()}} if bias else {}
    return SamplingParams(**{**fields, **known})


def logprobs_of(completion):
    if completion.logprobs is None:
        return None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [found[token].logprob for token, found in pairs]


async def answer(client, prompt, fields, streams):
    """As in `expected`."""
    body = {"prompt": prompt, **fields, "return_token_ids": True, "stream": streams}
    if not streams:
        choices = (await client.post("/v1/completions", json=body)).json()["choices"]
    else:
        choices = [choice async for chunk in events(client, body) for choice in chunk["choices"]]
    samples = {}
    for choice in choices:
        found = samples.setdefault(choice["index"], ["", [], None, None])
        found[0] += choice["text"]
        found[1] += choice["token_ids"]
        found[2] = choice["finish_reason"]
        if choice["logprobs"] is not None:
            found[3] = [*(found[3] or []), *choice["logprobs"]["token_logprobs"]]
    return [tuple(samples[index]) for index in sorted(samples)]


async def events(client, body):
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def leave(client, prompt, fields, streams):
    """Ask for a long answer and go before it ends."""
    body = {"prompt": prompt, **fields, "max_tokens": 400, "ignore_eos": True, "stream": streams}
    body.pop("stop", None)
    if streams:
        async with aclosing(events(client, body)) as chunks:
            await anext(chunks)
    else:
        with pytest.raises(httpx2.TimeoutException):
            await client.post("/v1/completions", json=body, timeout=0.4)


async def run_all(url, jobs, leaving):
    gate = asyncio.Semaphore(AT_A_TIME)
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def one(i, job):
            async with gate:
                return await (leave if i in leaving else answer)(client, *job)

        return await asyncio.gather(*(one(i, job) for i, job in enumerate(jobs)))


def aborted(live):
    """Samples that the engine has aborted so far."""
    metrics = asyncio.run(live.llm.get_metrics())
    return sum(each.value for each in metrics if each.labels == {"finished_reason": "abort"})


def test_answers_under_load_are_those_of_generate_while_others_leave(live, jobs, expected):
    num_free = live.until_idle()
    num_aborted = aborted(live)
    leaving = set(random.Random(1).sample(range(NUM_REQUESTS), NUM_LEAVING))

    found = asyncio.run(run_all(live.url, jobs, leaving))

    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if i not in leaving:
            assert ours == theirs, f"request {i}: {jobs[i]}"
    assert live.until_idle() == num_free == live.llm.llm.sizes.num_kv_blocks
    assert live.server.application.traffic.num_requests == 0
    # streams whose first chunk was read; the other requests may have ended before they began
    num_begun = sum(jobs[i][2] for i in leaving)
    assert aborted(live) - num_aborted >= num_begun > 10


def test_a_client_that_leaves_a_list_of_prompts_aborts_all_of_them(live, prompts):
    live.until_idle()
    num_aborted = aborted(live)
    body = {"prompt": prompts[:6], "max_tokens": 400, "ignore_eos": True, "n": 2, "seed": 1}

    async def leave_when_all_have_begun():
        seen = set()
        async with (
            httpx2.AsyncClient(base_url=live.url, timeout=60) as client,
            aclosing(events(client, {**body, "stream": True})) as chunks,
        ):
            while len(seen) < 12:
                seen.add((await anext(chunks))["choices"][0]["index"])

    asyncio.run(leave_when_all_have_begun())

    assert live.until_idle() == live.llm.llm.sizes.num_kv_blocks
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
    assert live.until_idle() == live.llm.llm.sizes.num_kv_blocks
