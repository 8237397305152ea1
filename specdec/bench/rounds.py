"""Rounds in steady state, as the device sees them: each one's time, and that of its phases."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from specdec.bench.timing import Clock, Mark, Spread
from specdec.engine import Engine
from specdec.requests.params import SamplingParams
from specdec.runner import Runner
from specdec.step import PHASES

WARMUP = 5


class Steady:
    """Requests behind their prompts; `run` goes one round on and reads nothing back."""

    def __init__(self, engine: Engine) -> None:
        self.runner, self.rows = (
            engine.runner,
            [request.row for request in engine.scheduler.running],
        )
        self._bound = max(request.num_tokens for request in engine.scheduler.running) - 1

    def run(self) -> None:
        self.runner.run_round(self.rows, self._bound)
        self._bound += self.runner.sizes.query_len


@contextmanager
def steady(engine: Engine, prompts: Sequence[Sequence[int]], num_rounds: int) -> Iterator[Steady]:
    """All prompts at once, with room for so many rounds."""
    room = (num_rounds + 1) * engine.runner.sizes.query_len
    params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
    requests = engine.add_requests([(prompt, params) for prompt in prompts])
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    engine.drain()
    for request in requests:
        engine.runner.grow(engine.scheduler.reserve(request))
    try:
        yield Steady(engine)
    finally:
        engine.abort_all()


def tokens_needed(num_rounds: int, num_speculative_tokens: int) -> int:
    """Tokens behind the prompt that `steady` wants room for."""
    return (num_rounds + 2) * (num_speculative_tokens + 1)


def time_rounds(engine: Engine, prompts: Sequence[Sequence[int]], repeats: int) -> Spread:
    """Milliseconds of a round."""
    clock = Clock(engine.runner.device)
    with steady(engine, prompts, repeats + WARMUP) as rounds:
        return clock.repeat(rounds.run, repeats, WARMUP)


def time_phases(
    engine: Engine, prompts: Sequence[Sequence[int]], repeats: int
) -> dict[str, Spread]:
    """Milliseconds of each act of a round, by the names of step.PHASES."""
    clock = Clock(engine.runner.device)
    marks: dict[str, list[tuple[Mark, Mark]]] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = clock.mark()
        yield
        marks.setdefault(name, []).append((start, clock.mark()))

    with steady(engine, prompts, repeats + WARMUP) as rounds:
        for _ in range(WARMUP):
            rounds.run()
        with around_phases(engine.runner, timed):
            for _ in range(repeats):
                rounds.run()
        clock.wait()
    return {
        name: Spread.of([clock.milliseconds(*each) for each in marks[name]])
        for name in PHASES
        if name in marks
    }


@contextmanager
def around_phases(
    runner: Runner, around: Callable[[str], AbstractContextManager[None]]
) -> Iterator[None]:
    """Run each act of the body's steps inside `around(name)`; on this runner only."""
    acts = runner.acts
    for name in PHASES:
        setattr(acts, name, _inside(getattr(acts, name), around, name))
    try:
        yield
    finally:
        for name in PHASES:
            delattr(acts, name)


def _inside(
    call: Callable[..., object], around: Callable[[str], AbstractContextManager[None]], phase: str
) -> Callable[..., object]:
    def wrapped(*args: object) -> object:
        with around(phase):
            return call(*args)

    return wrapped
