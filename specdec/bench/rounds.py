"""Rounds in steady state, as the device sees them: the time of each, and of its phases."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from specdec.arguments import from_mapping
from specdec.bench.serving import start
from specdec.bench.timing import Clock, Spread, wrapped
from specdec.engine import Engine
from specdec.requests.params import SamplingParams
from specdec.requests.request import Request
from specdec.requests.sampling_flags import SamplingFlags
from specdec.step import PHASES

WARMUP = 5


class Steady:
    """Requests whose prompts are computed; `run` goes one round on and reads nothing back."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._runner = engine.runner
        self._rows = [request.state_row for request in engine.scheduler.running]
        self._flags = SamplingFlags.of_all(request.flags for request in requests)
        self._bound = max(request.num_tokens for request in engine.scheduler.running) - 1

    def run(self) -> None:
        """Launch one round."""
        self._runner.run_step(self._rows, max_num_computed=self._bound, flags=self._flags)
        self._bound += self._runner.sizes.path_len


@contextmanager
def steady(
    engine: Engine, prompts: Sequence[Sequence[int]], num_rounds: int, **sampling: object
) -> Iterator[Steady]:
    """All prompts at once, with room for a warm-up and this many rounds; greedy by default."""
    room = (num_rounds + WARMUP + 1) * engine.runner.sizes.query_len
    values = {"temperature": 0.0, **sampling, "max_tokens": room, "ignore_eos": True}
    params = from_mapping(SamplingParams, values)
    scheduler = engine.scheduler
    budget, scheduler.budget = scheduler.budget, None  # or the first would end before the last runs
    try:
        requests = start(engine, [(prompt, params) for prompt in prompts])
    finally:
        scheduler.budget = budget
    engine.drain()
    for request in requests:
        engine.runner.start_rows(grown=engine.scheduler.blocks.reserve(request))
    try:
        yield Steady(engine, requests)
    finally:
        engine.abort_all()


def tokens_needed(num_rounds: int, num_speculative_tokens: int) -> int:
    """Tokens after the prompt for which an engine needs room to run `steady`."""
    return (num_rounds + WARMUP + 2) * (num_speculative_tokens + 1)


def time_rounds(
    engine: Engine, prompts: Sequence[Sequence[int]], repeats: int, **sampling: object
) -> Spread:
    """Milliseconds of a round."""
    with steady(engine, prompts, repeats, **sampling) as rounds:
        return Clock(engine.runner.device).repeat(rounds.run, repeats, WARMUP)


def time_phases(
    engine: Engine, prompts: Sequence[Sequence[int]], repeats: int
) -> dict[str, Spread]:
    """Milliseconds of each act of a round, by the names of step.PHASES."""
    clock = Clock(engine.runner.device)
    with steady(engine, prompts, repeats) as rounds:
        for _ in range(WARMUP):
            rounds.run()
        with wrapped(engine.runner.acts, PHASES, clock.around):
            for _ in range(repeats):
                rounds.run()
        found = defaultdict(list)
        for name, milliseconds in clock.spans():
            found[name].append(milliseconds)
    return {name: Spread.of(found[name]) for name in PHASES if name in found}
