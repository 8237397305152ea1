"""Rounds in steady state, as the device sees them: each one's time, and that of its phases."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import specdec.step
from specdec.bench.timing import Clock, Mark, Spread
from specdec.engine import Engine
from specdec.requests.params import SamplingParams
from specdec.runner import Runner

WARMUP = 5
PHASES = ("fill", "verify", "accept and commit", "draft prefill", "draft decode")


class Steady:
    """Requests behind their prompts; `run` goes one round on and reads nothing back."""

    def __init__(self, engine: Engine) -> None:
        self.runner, self.rows = engine.runner, [request.row for request in engine.scheduler.running]
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


def time_phases(engine: Engine, prompts: Sequence[Sequence[int]], repeats: int) -> dict[str, Spread]:
    """Milliseconds of each phase of a round; "fill" and "accept and commit" are what lies around the others."""
    clock = Clock(engine.runner.device)
    marks: list[tuple[str, Mark, Mark]] = []

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = clock.mark()
        yield
        marks.append((name, start, clock.mark()))

    with steady(engine, prompts, repeats + WARMUP) as rounds:
        for _ in range(WARMUP):
            rounds.run()
        bounds = [clock.mark()]
        with around_phases(engine.runner, timed):
            for _ in range(repeats):
                rounds.run()
                bounds.append(clock.mark())
        clock.wait()
    return _phase_spreads(clock, marks, list(itertools.pairwise(bounds)))


def _phase_spreads(
    clock: Clock, marks: Sequence[tuple[str, Mark, Mark]], spans: Sequence[tuple[Mark, Mark]]
) -> dict[str, Spread]:
    per_round = len(marks) // len(spans)
    times: dict[str, list[float]] = {name: [] for name in PHASES}
    for i, (start, end) in enumerate(spans):
        inner = {name: (a, b) for name, a, b in marks[i * per_round : (i + 1) * per_round]}
        for name in ("verify", "draft prefill", "draft decode"):
            if name in inner:
                times[name].append(clock.milliseconds(*inner[name]))
        times["fill"].append(clock.milliseconds(start, inner["verify"][0]))
        after = inner["draft prefill"][0] if "draft prefill" in inner else end
        times["accept and commit"].append(clock.milliseconds(inner["verify"][1], after))
    return {name: Spread.of(values) for name, values in times.items() if values}


@contextmanager
def around_phases(runner: Runner, around: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Run each phase of the body's rounds inside `around(name)`. Methods are wrapped on this runner only."""
    wanted: list[tuple[object, str, str]] = [(runner.target, "verify", "verify"), (runner.results, "send", "send")]
    if runner.draft is not None:
        wanted += [(runner.draft, "prefill", "draft prefill"), (runner.draft, "decode", "draft decode")]
    functions = [name for name in vars(specdec.step) if name.startswith(("accept", "commit_round"))]
    wanted += [(specdec.step, name, name.replace("_", " ")) for name in functions]
    originals = [(owner, name, vars(owner).get(name)) for owner, name, _ in wanted]
    for owner, name, phase in wanted:
        setattr(owner, name, _inside(getattr(owner, name), around, phase))
    try:
        yield
    finally:
        for owner, name, original in originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _inside(
    call: Callable[..., object], around: Callable[[str], AbstractContextManager[None]], phase: str
) -> Callable[..., object]:
    def wrapped(*args: object, **options: object) -> object:
        with around(phase):
            return call(*args, **options)

    return wrapped
