"""An open loop against a server: requests arrive at random, whether earlier ones have ended or not.

So a server that is too slow for its load shows in the waiting times, which a closed loop hides.
Arrivals are a Poisson process. Lengths are lognormal with the means of ShareGPT's conversations as
serving benchmarks use them: prompts of 215 tokens, answers of 198. Times and lengths follow from a
seed; the words are new in each run, so that no cache of prompts knows them.
"""

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2

from specdec.bench.options import LoadOptions
from specdec.bench.report import Row, percentile

PERCENTS = (50, 90, 99)
MEASURES = {
    "ttft": "time to first token",
    "tpot": "time per token after it",
    "itl": "between deliveries",
    "e2e": "whole answer",
}
PROMPT_MEAN, PROMPT_SPREAD = 215, 1.3  # spread: of the logarithm
ANSWER_MEAN, ANSWER_SPREAD = 198, 1.0
SHORTEST, LONGEST = 4, 1024  # tokens of a prompt or an answer
NUM_WORDS = 200  # that the server's tokenizer is measured with
# each is a token of its own for most tokenizers
WORDS = (
    "time people water light house number paper river music green small large early second place "
    "world story point country road winter summer market letter teacher doctor morning evening "
    "city question answer reason table field voice power line ship train"
)


@dataclass(slots=True, kw_only=True)
class Timing:
    """When one request's answer came, in seconds of the client's clock; error: why none came."""

    sent: float
    deliveries: list[float] = field(default_factory=list)  # of text; at least the end
    ended: float = 0.0
    is_finished: bool = False
    num_tokens: int = 0
    error: str | None = None

    def measures(self) -> dict[str, list[float]]:
        """Give seconds by measure; one token has no time per token, one delivery no gap."""
        first, last = self.deliveries[0], self.deliveries[-1]
        later = self.num_tokens - 1
        return {
            "ttft": [first - self.sent],
            "tpot": [(last - first) / later] if later > 0 else [],
            "itl": [b - a for a, b in itertools.pairwise(self.deliveries)],
            "e2e": [self.ended - self.sent],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """url: up to /v1. model: None for the first one listed. fields: of every request."""

    url: str
    model: str | None
    is_chat: bool
    api_key: str | None
    fields: dict[str, object]

    @property
    def path(self) -> str:
        return f"{self.url}/v1/{'chat/completions' if self.is_chat else 'completions'}"

    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def body(self, prompt: str, max_tokens: int) -> dict[str, object]:
        """Make a request for an answer in one piece."""
        messages = [{"role": "user", "content": prompt}]
        asked = {"messages": messages} if self.is_chat else {"prompt": prompt}
        return {"model": self.model, "max_tokens": max_tokens, **asked, **self.fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """at: seconds from the start."""

    at: float
    prompt: str
    max_tokens: int


async def run_load(options: LoadOptions) -> list[Row]:
    """Measure a row for each rate. ValueError if the server cannot be measured."""
    api, goodput = api_of(options), limits_of(options.goodput)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(timeout=options.timeout, limits=limits) as client:
        models = await listed_models(client, api)
        api = replace(api, model=api.model or next(iter(models)))
        context = models.get(str(api.model), {}).get("max_model_len")
        room = context if isinstance(context, int) else 2 * (LONGEST + SHORTEST)
        tokens_per_word = await num_tokens(client, api, words(NUM_WORDS)) / NUM_WORDS
        rows = []
        for rate in options.rates or (1.0,):
            plan = list(arrivals(options, rate, tokens_per_word, room))
            rows.append(figures(rate, *await _run(client, api, plan), goodput))
    return rows


def api_of(options: LoadOptions) -> Api:
    if not options.url.startswith(("http://", "https://")):
        raise ValueError(f"URL {options.url}: give one that begins with http:// or https://")
    fields = {"temperature": options.temperature, "ignore_eos": options.ignore_eos or None}
    return Api(
        url=options.url.rstrip("/").removesuffix("/v1"),
        model=options.model,
        is_chat=options.is_chat,
        api_key=options.api_key,
        fields={name: value for name, value in fields.items() if value is not None},
    )


def limits_of(text: str | None) -> dict[str, float]:
    """Read "ttft:500,tpot:50": the most milliseconds of a good answer, by measure."""
    limits = {}
    for part in text.split(",") if text is not None else ():
        name, _, value = part.partition(":")
        if name not in MEASURES or not value.replace(".", "", 1).isdigit():
            wanted = f"{', '.join(MEASURES)}, each with a number of ms, such as ttft:500,tpot:50"
            raise ValueError(f"--goodput {text}: give any of {wanted}")
        limits[name] = float(value)
    return limits


def arrivals(
    options: LoadOptions, rate: float, tokens_per_word: float, room: int
) -> Iterator[Arrival]:
    """Draw requests at `rate` requests a second. room: tokens of a prompt and its answer."""
    chance = random.Random(options.seed)
    at = 0.0
    for _ in range(options.num_requests):
        at += chance.expovariate(rate)
        prompt_tokens = _length(chance, PROMPT_MEAN, PROMPT_SPREAD)
        most = min(_length(chance, ANSWER_MEAN, ANSWER_SPREAD), room // 2)
        if options.max_tokens is not None:
            most = min(most, options.max_tokens)
        num_words = max(round(min(prompt_tokens, room // 2 - SHORTEST) / tokens_per_word), 1)
        yield Arrival(at=at, prompt=words(num_words), max_tokens=most)


def words(count: int) -> str:
    """Draw a text of random words."""
    return " ".join(random.SystemRandom().choices(WORDS.split(), k=count))


def _length(chance: random.Random, mean: float, spread: float) -> int:
    drawn = chance.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return round(min(max(drawn, SHORTEST), LONGEST))


async def _run(
    client: httpx2.AsyncClient, api: Api, plan: Sequence[Arrival]
) -> tuple[list[Timing], list[float]]:
    """Send each request at its time; also say how late each was sent."""
    start = time.perf_counter()

    async def one(arrival: Arrival) -> Timing:
        await asyncio.sleep(start + arrival.at - time.perf_counter())
        return await timed(client, api, arrival.prompt, arrival.max_tokens)

    timings = await asyncio.gather(*map(one, plan))
    lags = [timing.sent - start - arrival.at for timing, arrival in zip(timings, plan, strict=True)]
    return timings, lags


def figures(
    rate: float, timings: Sequence[Timing], lags: Sequence[float], goodput: Mapping[str, float]
) -> Row:
    """Sum up one run. Times are in ms; failed requests count in num_failed alone."""
    answered = [timing for timing in timings if timing.error is None]
    errors = [timing.error for timing in timings if timing.error is not None]
    measures = [timing.measures() for timing in answered]
    seconds = max(each.ended for each in timings) - min(each.sent for each in timings)
    num_good = sum(
        all(1e3 * value <= most for name, most in goodput.items() for value in found[name])
        for found in measures
    )
    row: Row = {
        "request_rate": rate,
        "num_requests": len(timings),
        "num_failed": len(errors),
        "first_error": errors[0] if errors else None,
        "seconds": seconds,
        "requests_per_second": len(answered) / seconds,
        "tokens_per_second": sum(each.num_tokens for each in answered) / seconds,
        "goodput": num_good / seconds if goodput else None,
        "send_lag_ms_p99": percentile(lags, 99),
    }
    for name in MEASURES:
        values = [value for found in measures for value in found[name]]
        row |= {f"{name}_ms_p{percent}": percentile(values, percent) for percent in PERCENTS}
    return row


async def listed_models(client: httpx2.AsyncClient, api: Api) -> dict[str, dict[str, object]]:
    """Ask /v1/models, by id; ValueError if there is no such server."""
    data = (await _checked(client, "GET", f"{api.url}/v1/models", api)).get("data")
    if not isinstance(data, list) or not data:
        raise ValueError(f"{api.url}/v1/models lists no model")
    return {str(each.get("id")): each for each in data}


async def num_tokens(client: httpx2.AsyncClient, api: Api, prompt: str) -> int:
    """Ask how many tokens a prompt has, by the usage that the server reports."""
    usage = (await _checked(client, "POST", api.path, api, api.body(prompt, 1))).get("usage")
    found = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if not isinstance(found, int):
        raise ValueError(f"{api.path}: an answer without usage.prompt_tokens")
    return found


async def timed(client: httpx2.AsyncClient, api: Api, prompt: str, max_tokens: int) -> Timing:
    """Send a request and read its stream."""
    body = api.body(prompt, max_tokens)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    timing = Timing(sent=time.perf_counter())
    try:
        async for event in _events(client, api, body):
            _take(timing, event)
    except (httpx2.HTTPError, ValueError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.ended = time.perf_counter()
    if timing.error is None and not timing.is_finished:
        timing.error = "the stream ended before the answer"
    timing.deliveries = timing.deliveries or [timing.ended]
    return timing


def _take(timing: Timing, event: dict[str, Any]) -> None:
    if "error" in event:
        raise ValueError(str(event["error"]))
    try:
        if event.get("usage"):
            timing.num_tokens = int(event["usage"]["completion_tokens"])
        for choice in event.get("choices") or ():
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                timing.deliveries.append(time.perf_counter())
            timing.is_finished |= choice.get("finish_reason") is not None
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"an event that is not OpenAI's: {json.dumps(event):.200}") from error


async def _events(
    client: httpx2.AsyncClient, api: Api, body: dict[str, object]
) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", api.path, json=body, headers=api.headers()) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise ValueError(f"status {response.status_code}: {text:.200}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and data != "[DONE]":
                yield json.loads(data)


async def _checked(
    client: httpx2.AsyncClient, method: str, url: str, api: Api, body: object = None
) -> dict[str, object]:
    """Read the JSON of an answer; ValueError if there is none."""
    try:
        response = await client.request(method, url, json=body, headers=api.headers())
        found = response.json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise ValueError(f"{url}: {str(error) or type(error).__name__}") from error
    if response.status_code != 200 or not isinstance(found, dict):
        raise ValueError(f"{url}: status {response.status_code}: {response.text:.200}")
    return found
