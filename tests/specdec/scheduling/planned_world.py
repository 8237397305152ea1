"""The loop with a planner, which is told what an engine tells it."""

import numpy as np

from specdec.config import MAX_PROMPT_SLOWDOWN
from specdec.passes.captured import shared_shapes
from specdec.scheduling.costs import PromptBudget, StepCosts, TreeCosts
from specdec.scheduling.outcomes import RoundOutcome
from specdec.scheduling.planner import Planner, StepSize
from specdec.sizes import PLAIN, chain
from tests.specdec.scheduling import loop_world
from tests.specdec.scheduling.chance import K
from tests.specdec.scheduling.loop_world import TREE, LoopWorld

TREES = TreeCosts(all_levels=loop_world.TREE_ROUNDS, one_level=loop_world.TREE_STOPPED, shape=TREE)
COSTS = StepCosts(
    rounds=loop_world.ROUNDS,
    mixed=loop_world.MIXED,
    plain=loop_world.PLAIN,
    level=loop_world.LEVEL,
    skipped_ms=loop_world.SKIPPED,
    ms_per_key=loop_world.KEY,
    tree=TREES,
)
BUDGET = PromptBudget(costs=COSTS, slowdown=MAX_PROMPT_SLOWDOWN)


class Adapter:
    """Makes a world's planner and tells it of steps."""

    def planner(self, world):
        return Planner(COSTS, shared_shapes(world.sizes), K)

    def calibrated(self, planner, said, is_sampled):
        """Judge drafts as the device does."""
        odds = said / (1 - said) * planner.factors[is_sampled.astype(int), : said.shape[1]]
        return odds / (1 + odds)

    def observe(self, planner, step):
        requests = step.work.verifying
        shape = chain(step.work.num_live) if step.drafts else PLAIN
        if step.is_tree:
            shape = TREE.of(len(requests)).drafts
        size = StepSize(
            num_requests=len(requests),
            num_rows=step.work.num_verify_rows,
            num_prompt_rows=sum(part.length for part in step.work.parts),
            num_keys=sum(each.num_tokens for each in requests),
            shape=shape,
        )
        planner.observe_time(size, step.told_ms, 0.0)
        if shape == PLAIN:
            planner.observe_plain(len(requests))
            return
        runs = np.array([each.finish is None for each in requests])
        paths = [each.probs if step.is_tree else each.paths for each in step.drafts]
        probs = np.zeros((len(requests), shape.nodes if step.is_tree else K))
        for row, of_request in zip(probs, paths, strict=True):
            row[: len(of_request)] = of_request[: shape.nodes]
        parents = [each.parents[: shape.nodes] for each in step.drafts] if step.is_tree else ()
        outcome = RoundOutcome(
            shape=shape,
            probs=probs,
            parents=parents,
            num_verified=np.array(step.verified) * runs,
            num_accepted=(np.array(step.counts) - 1) * runs,
            num_allowed=K * runs,
            is_sampled=np.array([each.params.temperature > 0 for each in requests]),
            threshold=planner.threshold,
            num_on_chains=on_chains(step) * runs if step.is_tree else None,
        )
        planner.observe(outcome)


def on_chains(step):
    """Count the drafts that held and are first children all the way."""
    found = []
    for tree, count in zip(step.drafts, step.counts, strict=True):
        at = num_held = 0
        for row in tree.path[: count - 1]:
            if row != 1 + tree.parents.index(at):
                break
            at, num_held = row, num_held + 1
        found.append(num_held)
    return np.array(found)


def world(num_requests, draft, fixed=None, **options):
    """fixed: None: as the planner says"""
    if fixed is not None:
        return LoopWorld(num_requests, draft, fixed=fixed, budget=BUDGET, **options)
    return LoopWorld(num_requests, draft, adapter=Adapter(), budget=BUDGET, **options)
