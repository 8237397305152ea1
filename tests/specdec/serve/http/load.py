"""Random requests, what LLM.generate answers to them, and clients that send them to a server."""

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass

import httpx2
import pytest

from specdec import LLM, SamplingParams
from tests.e2e.guided_cases import CASES

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
ENDLESS = "[a-z ]{999}"  # a regex


@dataclass(frozen=True)
class Job:
    """A completion. fields: of sampling. case: structured output, as LLM.generate takes it."""

    prompt: object
    fields: dict[str, object]
    streams: bool
    case: dict[str, object] | None = None

    def body(self):
        """As a client sends it."""
        return {"prompt": self.prompt, **self.fields, **spelled(self.case), "stream": self.streams}

    def params(self):
        """As LLM.generate takes it."""
        bias = self.fields.get("logit_bias")
        known = {"logit_bias": {int(key): value for key, value in bias.items()}} if bias else {}
        return SamplingParams(**{**self.fields, **known}, structured_outputs=self.case)


def spelled(case):
    """By the field that suits it: OpenAI's, vLLM's earlier one, or vLLM's."""
    if case is None:
        return {}
    if "json" in case:
        schema = {"name": "a", "strict": True, "schema": case["json"]}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"guided_regex": case["regex"]} if "regex" in case else {"structured_outputs": case}


def job_of(chance, prompts):
    """Random sampling."""
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
    return Job(prompt, fields, chance.random() < 0.5)


def guided_job_of(chance, prompts):
    """An answer that follows a random grammar."""
    temperature = chance.choice((0.0, 1.0))
    fields = {"temperature": temperature, "seed": chance.getrandbits(63)}
    fields["max_tokens"] = chance.randint(4, 40)
    if temperature > 0 and chance.random() < 0.25:
        fields["n"] = 2
    prompt = chance.choice(prompts)[: chance.randint(5, 60)]
    kind = chance.choice(("json", "json", "regex", "choice", "grammar"))
    case = chance.choice([case for case in CASES if kind in case])
    return Job(prompt, fields, chance.random() < 0.5, case)


def expected_of(jobs):
    """What LLM.generate gives: text, token ids, finish reason and logprobs of each sample."""
    draft = {"model": "demo", "num_speculative_tokens": 3}
    with LLM("demo", draft, device="cpu", max_num_seqs=16, max_model_len=512) as llm:
        params = [job.params() for job in jobs]
        outputs = llm.generate([job.prompt for job in jobs], params, use_tqdm=False)
    return [
        [(each.text, each.token_ids, each.finish_reason, logprobs_of(each)) for each in one.outputs]
        for one in outputs
    ]


def logprobs_of(completion):
    if completion.logprobs is None:
        return None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [found[token].logprob for token, found in pairs]


def run_all(url, jobs, leaving, at_a_time):
    """The answers to all jobs; None for those whose clients leave."""
    return asyncio.run(_run_all(url, jobs, leaving, at_a_time))


async def _run_all(url, jobs, leaving, at_a_time):
    gate = asyncio.Semaphore(at_a_time)
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def one(i, job):
            async with gate:
                return await (leave if i in leaving else answer)(client, job)

        return await asyncio.gather(*(one(i, job) for i, job in enumerate(jobs)))


async def answer(client, job):
    """As in `expected_of`."""
    body = {**job.body(), "return_token_ids": True}
    if not job.streams:
        found = await client.post("/v1/completions", json=body)
        assert found.status_code == 200, found.text
        choices = found.json()["choices"]
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
    """The chunks of a stream."""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def leave(client, job):
    """Ask for a long answer and go before it ends."""
    body = {**job.body(), "max_tokens": 400}
    if job.case is None:
        body["ignore_eos"] = True
    else:
        body = {name: body[name] for name in body if name not in spelled(job.case)}
        body["guided_regex"] = ENDLESS
    body.pop("stop", None)
    if job.streams:
        async with aclosing(events(client, body)) as chunks:
            await anext(chunks)
    else:
        with pytest.raises(httpx2.TimeoutException):
            await client.post("/v1/completions", json=body, timeout=0.4)


def aborted(live):
    """Samples that the engine has aborted so far."""
    metrics = live.run(live.llm.get_metrics())
    return sum(each.value for each in metrics if each.labels == {"finished_reason": "abort"})
