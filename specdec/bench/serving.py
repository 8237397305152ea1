"""The protocol: a list of prompts through an engine, so many at a time, and the tokens per second behind the first.

Only decoding counts: tokens are those behind the first one of each request, time runs from the first tokens of a batch
to the end of its last request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.engine import Engine
from specdec.requests.output import RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.stats import SpeculationStats


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
        return (
            1e3 * self.batch / self.tokens_per_second * (self.stats.mean_acceptance_length or 1.0)
        )


def serve(engine: Engine, prompts: Sequence[Sequence[int]], batch: int, max_tokens: int) -> Served:
    """All prompts once, `batch` at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs, seconds = [], 0.0
    for start in range(0, len(prompts), batch):
        group = generate(engine, prompts[start : start + batch], params)
        times = [(output.stats.first_token_time, output.stats.last_token_time) for output in group]
        seconds += max(last or 0.0 for _, last in times) - max(first or 0.0 for first, _ in times)
        outputs += group
    return Served(
        batch=batch,
        token_ids=[output.outputs[0].token_ids for output in outputs],
        seconds=max(seconds, 1e-9),
        stats=SpeculationStats.merged(output.stats for output in outputs),
    )


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[RequestOutput]:
    """All at once, in their order."""
    requests = engine.add_requests([(prompt, params) for prompt in prompts])
    while engine.has_unfinished:
        engine.step()
    engine.drain()
    return [request.output() for request in requests]


def best_of(
    engine: Engine, prompts: Sequence[Sequence[int]], batch: int, max_tokens: int, repeats: int
) -> tuple[Served, list[Served]]:
    """The fastest of several whole runs behind a warm-up, and all of them."""
    serve(engine, prompts[:batch], batch, min(max_tokens, 16))
    runs = [serve(engine, prompts, batch, max_tokens) for _ in range(repeats)]
    return max(runs, key=lambda run: run.tokens_per_second), runs


def first_difference(
    found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> str | None:
    """Where the first output differs from plain decoding, in words; None where all are equal."""
    for i, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        if list(ours) != list(plain):
            at = next(
                (t for t, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b),
                min(len(ours), len(plain)),
            )
            return f"prompt {i} differs from plain decoding at token {at}"
    return None
