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
from specdec.bench.loop import engine_spec, jobs, run_loop
from specdec.bench.pair import PLAIN
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
    for batch, temperature in product(bench.batches, bench.options.temperatures or (0.0,)):
        if bench.has_time(f"noise: batch {batch}, temperature {temperature}"):
            row: Row = {"num_speculative_tokens": auto.name, "batch": batch}
            row["temperature"] = temperature
            yield row | _figures(bench, eagle, auto, batch, temperature)
    bench.pair.drop()


def _figures(
    bench: Bench, eagle: LoadedEagle, auto: Drafting, batch: int, temperature: float
) -> Row:
    speeds: dict[str, float] = {}
    choices: Row = {}
    for name, drafting, num_steps in (
        ("plain", PLAIN, STEPS_WITH_NOISE),
        ("with_noise", auto, STEPS_WITH_NOISE),
        ("again", auto, STEPS_WITHOUT),
        ("later", auto, STEPS_WITHOUT),
    ):
        has_noise = name == "with_noise"
        engine = bench.pair.engine(engine_spec(bench, drafting))
        with random_weights(eagle) if has_noise else nullcontext():
            window = run_loop(engine, jobs(bench, batch, temperature), batch, num_steps)
        if difference := bench.outputs.difference(window.requests):
            return difference
        speeds[name] = window.tokens_per_second
        if has_noise:
            choices = {f"noise_{key}": value for key, value in window.planned.items()}
    return {
        **speeds,
        "noise_over_plain": speeds["with_noise"] / speeds["plain"],
        "again_over_best": speeds["again"] / max(speeds["again"], speeds["later"]),
        **choices,
    }


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
