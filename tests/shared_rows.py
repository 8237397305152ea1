"""Engines on a CPU that share rows out as on a GPU, and planners that choose by chance."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from specdec import LLM
from specdec.scheduling.costs import StepCosts
from specdec.scheduling.planner import NextRound, RoundPlan
from specdec.sizes import TreeShape, chain
from specdec.speculative_config import SpeculativeConfig
from specdec.start import load
from specdec.start.speculation import Drafting, drafting_of

# drafts pay for few rows, and for many they do not
ROUND_COSTS = StepCosts(
    rounds=((8, 1.0), (16, 1.5), (64, 6.0)), plain=((1, 0.9), (6, 0.95)), level=((1, 0.05),)
)


@contextmanager
def rows_are_shared(
    costs: StepCosts | None = ROUND_COSTS, tree: TreeShape | None = None
) -> Iterator[None]:
    """Let an engine on a CPU, too, share rows out while the body runs, by costs made up here.

    costs: None: those of a GPU. tree: offered where the number of drafts adapts; None: that of auto
    """
    kept = load.drafting_of, load.measure_round_costs

    def with_tree(speculation: SpeculativeConfig | None, _: bool) -> Drafting:
        drafting = drafting_of(speculation, has_graphs=True)
        return drafting if tree is None else replace(drafting, tree=tree)

    load.drafting_of = with_tree
    if costs is not None:
        load.measure_round_costs = lambda *_: costs
    try:
        yield
    finally:
        load.drafting_of, load.measure_round_costs = kept


def at_random(llm: LLM, chance: random.Random, share: float = 0.5) -> None:
    """Make a share of the choices of rows, levels and thresholds by chance from here on.

    Where chains and trees are offered, half of these choices are trees.
    """
    planner, runner = llm.engine.planner, llm.engine.runner
    real, stop_below = planner.plan, runner.stop_below

    def plan(coming: NextRound) -> RoundPlan:
        planned = real(coming)
        if chance.random() >= share:
            return planned
        most, num_requests = llm.sizes.num_speculative_tokens, coming.num_requests
        if coming.tree is not None and chance.random() < 0.5:
            return RoundPlan(num_requests, coming.tree)
        rows = num_requests + chance.randint(0, num_requests * most)
        levels = chance.choice([0, 0, chance.randint(0, most)])
        lengths = (0, *llm.sizes.chain_lengths)
        return RoundPlan(rows, chain(next(each for each in lengths if each >= levels)))

    def stop(threshold: float) -> None:
        by_chance = chance.choice([0.0, 0.1, 0.5, 1.0])
        stop_below(by_chance if chance.random() < share else threshold)

    planner.plan, runner.stop_below = plan, stop
