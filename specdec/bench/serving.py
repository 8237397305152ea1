"""The one way to serve: jobs through an engine, and the tokens per second after each first token.

Only decoding counts: the tokens after the first one of each request, in the time from the first
tokens of a batch to the end of its last request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from specdec.engine import Engine
from specdec.kernels.compilations import compilations
from specdec.requests.params import SamplingParams
from specdec.requests.request import Request
from specdec.requests.stats import SpeculationStats

Job = tuple[Sequence[int], SamplingParams]
Found = TypeVar("Found")
MOST_RUNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One run. seconds: of decoding."""

    batch: int
    token_ids: list[list[int]]
    seconds: float
    stats: SpeculationStats

    @property
    def tokens_per_second(self) -> float:
        return sum(len(tokens) - 1 for tokens in self.token_ids) / self.seconds

    @property
    def round_ms(self) -> float:
        """Time per token and user, times tokens per round."""
        mean = self.stats.mean_acceptance_length or 1.0
        return 1e3 * self.batch / self.tokens_per_second * mean


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def greedy(
    prompts: Sequence[Sequence[int]], max_tokens: int, params: SamplingParams = GREEDY
) -> list[Job]:
    """Jobs of exactly `max_tokens` tokens each."""
    params = replace(params, max_tokens=max_tokens)
    return [(prompt, params) for prompt in prompts]


def start(engine: Engine, jobs: Sequence[Job]) -> list[Request]:
    """Add all jobs at once, and step until each prompt is computed."""
    requests = engine.add_requests(jobs)
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    return requests


def generate(engine: Engine, jobs: Sequence[Job]) -> list[Request]:
    """Run all jobs at once; the finished requests are in their order."""
    requests = engine.add_requests(jobs)
    while engine.has_unfinished:
        engine.step()
    engine.drain()
    return requests


def without_compiling(run: Callable[[], Found]) -> Found:
    """What a run finds in whose time no kernel was compiled: else it is repeated.

    The kernels of an engine of the bench are compiled when they are first launched, and a warm-up
    does not launch those of longer contexts.
    """
    for _ in range(MOST_RUNS):
        compiled = compilations().unexpected
        before = compiled.total()
        found = run()
        if compiled.total() == before:
            return found
    raise RuntimeError(f"kernels were compiled in each of {MOST_RUNS} runs of the same requests")


def serve(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    batch: int,
    max_tokens: int,
    params: SamplingParams = GREEDY,
) -> Served:
    """All prompts once, `batch` at a time."""
    requests = []
    seconds = 0.0
    for first in range(0, len(prompts), batch):
        jobs = greedy(prompts[first : first + batch], max_tokens, params)
        group = without_compiling(partial(generate, engine, jobs))
        begun = [request.stats.first_token_time or 0.0 for request in group]
        ended = [request.stats.last_token_time or 0.0 for request in group]
        seconds += max(ended) - max(begun)
        requests += group
    return Served(
        batch=batch,
        token_ids=[request.token_ids for request in requests],
        seconds=max(seconds, 1e-9),
        stats=SpeculationStats.merged(request.stats for request in requests),
    )


def merged(runs: Sequence[Served]) -> Served:
    """One run after another, all of the same batch."""
    return Served(
        batch=runs[0].batch,
        token_ids=[tokens for run in runs for tokens in run.token_ids],
        seconds=sum(run.seconds for run in runs),
        stats=SpeculationStats.merged(run.stats for run in runs),
    )


def first_difference(
    found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> str | None:
    """Where the first output differs from plain decoding, in words; None if all are equal."""
    for i, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        if list(ours) != list(plain):
            pairs = enumerate(zip(ours, plain, strict=False))
            at = next((t for t, (a, b) in pairs if a != b), min(len(ours), len(plain)))
            return f"prompt {i} differs from plain decoding at token {at}"
    return None
