"""An open loop against a server: requests arrive at random, whether earlier ones have ended or not.

So a server that is too slow for its load shows in the waiting times, which a closed loop hides.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import httpx2

from specdec.bench.arrivals import Arrival, Lengths, arrivals
from specdec.bench.http_client import Api, Timing, listed_models, timed, tokens_per_word
from specdec.bench.percentiles import percentile

Row = dict[str, object]
PERCENTS = (50, 90, 99)
MEASURES = {
    "ttft": "time to first token",
    "tpot": "time per token after it",
    "itl": "between deliveries",
    "e2e": "whole answer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """rates: requests a second, each a run of num_requests.

    model: None for the first one that the server lists. goodput: limits in ms by measure, which a
    good answer keeps. most_answer: tokens.
    """

    url: str
    model: str | None
    is_chat: bool
    api_key: str | None
    fields: dict[str, object]
    rates: Sequence[float]
    num_requests: int
    most_answer: int | None
    goodput: Mapping[str, float]
    seed: int
    timeout: float


async def run_load(options: LoadOptions) -> list[Row]:
    """A row for each rate. ValueError if the server cannot be measured."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(timeout=options.timeout, limits=limits) as client:
        api, lengths = await _prepare(client, options)
        rows = []
        for rate in options.rates:
            plan = arrivals(rate, options.num_requests, lengths, options.seed)
            timings, lags = await _run(client, api, list(plan))
            rows.append(figures(rate, timings, lags, options.goodput))
    return rows


async def _prepare(client: httpx2.AsyncClient, options: LoadOptions) -> tuple[Api, Lengths]:
    """Ask for the model, its context, and the tokens of a word."""
    api = Api(
        url=options.url,
        model=options.model or "",
        is_chat=options.is_chat,
        api_key=options.api_key,
        fields=options.fields,
    )
    models = await listed_models(client, api)
    listed = {str(each.get("id")): each for each in models}
    name = options.model or next(iter(listed))
    api = replace(api, model=name)
    most = listed.get(name, {}).get("max_model_len")
    lengths = Lengths(
        tokens_per_word=await tokens_per_word(client, api),
        most_tokens=most if isinstance(most, int) else None,
        most_answer=options.most_answer,
    )
    return api, lengths


async def _run(
    client: httpx2.AsyncClient, api: Api, plan: Sequence[Arrival]
) -> tuple[list[Timing], list[float]]:
    """Send each request at its time; also how late each was sent."""
    start = time.perf_counter()

    async def one(arrival: Arrival) -> Timing:
        await asyncio.sleep(start + arrival.at - time.perf_counter())
        return await timed(client, api, arrival)

    timings = await asyncio.gather(*map(one, plan))
    lags = [timing.sent - start - arrival.at for timing, arrival in zip(timings, plan, strict=True)]
    return timings, lags


def figures(
    rate: float, timings: Sequence[Timing], lags: Sequence[float], goodput: Mapping[str, float]
) -> Row:
    """One run. Times are in ms; failed requests count in num_failed alone."""
    answered = [timing for timing in timings if timing.error is None]
    errors = [timing.error for timing in timings if timing.error is not None]
    seconds = max(each.ended for each in timings) - min(each.sent for each in timings)
    row: Row = {
        "request_rate": rate,
        "num_requests": len(timings),
        "num_failed": len(errors),
        "first_error": errors[0] if errors else None,
        "seconds": seconds,
        "requests_per_second": len(answered) / seconds,
        "tokens_per_second": sum(each.num_tokens for each in answered) / seconds,
        "goodput": _goodput(answered, goodput) / seconds if goodput else None,
        "send_lag_ms_p99": percentile(lags, 99),
    }
    for name in MEASURES:
        values = [value for timing in answered for value in measured(timing)[name]]
        row |= {f"{name}_ms_p{percent}": percentile(values, percent) for percent in PERCENTS}
    return row


def measured(timing: Timing) -> dict[str, list[float]]:
    """Seconds by measure. Of one token there is no time per token, of one delivery no gap."""
    first, last = timing.deliveries[0], timing.deliveries[-1]
    later = timing.num_tokens - 1
    return {
        "ttft": [first - timing.sent],
        "tpot": [(last - first) / later] if later > 0 else [],
        "itl": [b - a for a, b in itertools.pairwise(timing.deliveries)],
        "e2e": [timing.ended - timing.sent],
    }


def _goodput(answered: Sequence[Timing], limits: Mapping[str, float]) -> int:
    """Answers that keep every limit."""
    return sum(
        all(1e3 * value <= most for name, most in limits.items() for value in found[name])
        for found in map(measured, answered)
    )
