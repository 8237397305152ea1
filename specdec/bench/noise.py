"""Closed loops with a draft of random weights, and with the same draft made good again.

Auto is to lose nothing by a useless draft, and to find out soon when it is useful. Requests are
those of the suite loop; each measurement begins with a fresh loop of them, a number of steps before
its window.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product

import torch

from specdec.bench.bench import Bench
from specdec.bench.loop import (
    Loop,
    Outputs,
    compared,
    engine_spec,
    jobs,
    measured,
    num_measured,
    planned,
    planner_statistics,
)
from specdec.bench.pair import EngineSpec
from specdec.bench.report import Row
from specdec.start.speculation import Drafting
from weights.load import LoadedEagle

STEPS_WITH_NOISE, STEPS_WITHOUT = 50, 200  # before a window begins


def noise(bench: Bench) -> Iterator[Row]:
    """Run auto with a draft of random weights beside plain decoding, and with its own again.

    Tokens per second are taken 50 steps after a loop with random weights began, and 200 after each
    of two loops with its own began. The row also says what was planned with random weights.
    """
    bench.pair.drop()
    eagle = bench.pair.eagle
    if eagle is None:
        return
    auto = bench.auto(eagle)
    if auto.is_adaptive and bench.pair.device.type != "cuda":  # costs are measured with graphs
        return
    plain_spec, spec = engine_spec(bench, Drafting(0)), engine_spec(bench, auto)
    known: Outputs = {}
    for batch, temperature in product(bench.options.batches, bench.options.temperatures or (0.0,)):
        if not bench.has_time(f"noise: batch {batch}, temperature {temperature}"):
            continue
        settings = (
            ("plain", plain_spec, False, STEPS_WITH_NOISE),
            ("with_noise", spec, True, STEPS_WITH_NOISE),
            ("again", spec, False, STEPS_WITHOUT),
            ("later", spec, False, STEPS_WITHOUT),
        )
        row: Row = {"num_speculative_tokens": auto.name, "batch": batch}
        row["temperature"] = temperature
        speeds: dict[str, float] = {}
        choices: Row = {}
        for name, of_setting, has_noise, num_steps in settings:
            with random_weights(eagle) if has_noise else nullcontext():
                speeds[name], difference, chosen = _loop(
                    bench, of_setting, batch, temperature, num_steps, known
                )
            row |= difference or {}
            if has_noise:
                choices = {f"noise_{name}": value for name, value in chosen.items()}
        if "refused" not in row:
            row |= speeds
            row["noise_over_plain"] = speeds["with_noise"] / speeds["plain"]
            row["again_over_best"] = speeds["again"] / max(speeds["again"], speeds["later"])
            row |= choices
        yield row
    bench.pair.drop()


def _loop(
    bench: Bench,
    spec: EngineSpec,
    batch: int,
    temperature: float,
    num_steps: int,
    known: Outputs,
) -> tuple[float, Row | None, Row]:
    """Measure speed after so many steps; say where an output differs and what was planned."""
    engine = bench.pair.engine(spec)
    running = Loop(engine, jobs(bench, batch, temperature))
    running.run(batch, most_steps=num_steps)
    before = planner_statistics(engine)
    speed = measured(running, batch, num_measured(batch)).tokens_per_second
    return speed, compared(running.requests, temperature, known), planned(engine, before)


@contextmanager
def random_weights(eagle: LoadedEagle) -> Iterator[None]:
    """Overwrite the draft's matrices by noise of their mean size, in place, and restore them."""
    kept = {name: x.clone() for name, x in eagle.tensors.items() if x.ndim == 2}
    generator = torch.Generator(next(iter(kept.values())).device).manual_seed(0)
    try:
        for name, x in kept.items():
            eagle.tensors[name].normal_(0, x.float().std().item(), generator=generator)
        yield
    finally:
        for name, x in kept.items():
            eagle.tensors[name].copy_(x)
