"""The one way to serve: jobs through an engine, and the tokens per second after each first token.

Only decoding counts: the tokens after the first one of each request, in the time from the first
tokens of a batch to the end of its last request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specdec.bench.report import Row
from specdec.engine import Engine
from specdec.kernels.compilations import compilations
from specdec.requests.params import SamplingParams
from specdec.requests.request import Request
from specdec.requests.stats import SpeculationStats

Job = tuple[Sequence[int], SamplingParams]
MOST_RUNS = 4
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One run or several, one after another. seconds: of decoding."""

    batch: int
    requests: list[Request]
    seconds: float

    @property
    def stats(self) -> SpeculationStats:
        return SpeculationStats.merged(request.stats for request in self.requests)

    @property
    def tokens_per_second(self) -> float:
        return sum(len(request.token_ids) - 1 for request in self.requests) / self.seconds

    def figures(self, plain: "Served | None") -> Row:
        """Make a row beside plain decoding; round_ms: a user's time per token, times the tokens."""
        speed = self.tokens_per_second
        mean = self.stats.mean_acceptance_length
        return {
            "tokens_per_second": speed,
            "against_plain": None if plain is None else speed / plain.tokens_per_second,
            "round_ms": 1e3 * self.batch / speed * (mean or 1.0),
            "mean_acceptance_length": mean,
        }


@dataclass(slots=True)
class Outputs:
    """The longest output known of each job: plain decoding's, which runs first."""

    _known: dict[tuple[object, ...], list[int]] = field(default_factory=dict)

    def difference(self, requests: Sequence[Request]) -> Row:
        """Compare, and remember what is new: an empty row, or "refused" and where one differs."""
        for i, request in enumerate(requests):
            params = request.params
            seed = params.seed if params.temperature > 0 else None
            job = params.temperature, seed, tuple(request.prompt_token_ids)
            known = self._known.get(job, [])
            for at, (ours, plain) in enumerate(zip(request.token_ids, known, strict=False)):
                if ours != plain:
                    return {"refused": f"prompt {i} differs from plain decoding at token {at}"}
            if len(request.token_ids) > len(known):
                self._known[job] = list(request.token_ids)
        return {}

    def known(self, prompt: Sequence[int]) -> list[int]:
        """Return the longest greedy output known of a prompt; it may be empty."""
        return self._known.get((0.0, None, tuple(prompt)), [])


def greedy(
    prompts: Sequence[Sequence[int]], max_tokens: int, params: SamplingParams = GREEDY
) -> list[Job]:
    """Make jobs of exactly `max_tokens` tokens each."""
    params = replace(params, max_tokens=max_tokens)
    return [(prompt, params) for prompt in prompts]


def generate(engine: Engine, jobs: Sequence[Job]) -> list[Request]:
    """Run all jobs at once; the finished requests are in their order."""
    requests = engine.add_requests(jobs)
    while engine.has_unfinished:
        engine.step()
    engine.drain()
    return requests


def _without_compiling(engine: Engine, jobs: Sequence[Job]) -> list[Request]:
    """Run all jobs at once, again until no kernel was compiled in its time.

    The kernels of an engine of the bench are compiled when they are first launched, and a warm-up
    does not launch those of longer contexts.
    """
    for _ in range(MOST_RUNS):
        compiled = compilations().unexpected
        before = compiled.total()
        found = generate(engine, jobs)
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
    """Serve all prompts once, `batch` at a time."""
    requests = []
    seconds = 0.0
    for first in range(0, len(prompts), batch):
        jobs = greedy(prompts[first : first + batch], max_tokens, params)
        group = _without_compiling(engine, jobs)
        begun = [request.stats.first_token_time or 0.0 for request in group]
        ended = [request.stats.last_token_time or 0.0 for request in group]
        seconds += max(ended) - max(begun)
        requests += group
    return Served(batch=batch, requests=requests, seconds=max(seconds, 1e-9))


def merged(runs: Sequence[Served]) -> Served:
    """Take runs of the same batch as one, one after another."""
    requests = [request for run in runs for request in run.requests]
    return Served(batch=runs[0].batch, requests=requests, seconds=sum(run.seconds for run in runs))
