"""Steps of requests that differ, for measuring what a mixture of experts costs.

Rows of padding choose no expert, and rows of one token all choose the same few: a step of either
would seem to cost what one row does. So its rows take random tokens, and what the embedding and the
layers make of them meets the router. Tokens of a text resemble their neighbours and hit somewhat
fewer experts: the planner's running ratio (scheduling/costs.py) corrects what steps really take.

Targets without experts are measured with padding.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from specdec.models.experts import rows_adding_experts
from specdec.rounds.step_sizes import Step
from specdec.rounds.upload import RowStart
from specdec.runner import Runner
from specdec.sizes import BLOCK_SIZE, DraftShape, EngineSizes

SEED = 0


def doubling(runner: Runner, each: int = 1) -> list[int]:
    """List multiples of `each`, each twice the one before, while more rows hit more experts.

    There are none without experts: rows that share tiles then cost the same.
    """
    most = rows_adding_experts(runner.target.model.experts)
    return [each << i for i in range(most.bit_length()) if each << i <= most]


def spread(runner: Runner, step: Step) -> tuple[Step, Callable[[], None] | None]:
    """Let the requests of a step differ, if the target has experts.

    Padding becomes requests in the first state rows. Their blocks are the scratch block, where the
    tokens of measured prompts are their context: a first token is one to which models attend for no
    reason of its own, and its experts are always the same.
    Returns what has to be called before each run, since a step changes its requests.
    """
    if runner.target.model.experts is None:
        return step, None
    drawn = np.random.default_rng(SEED)
    vocab_size = runner.state.sampling.vocab_size
    prompts = [drawn.integers(vocab_size, size=len(part.prompt)).tolist() for part in step.parts]
    pairs = zip(step.parts, prompts, strict=True)
    step = replace(step, parts=[replace(part, prompt=prompt) for part, prompt in pairs])
    count = len(step.state_rows)
    if count == 0:
        return step, None
    if step.state_rows[0] < 0:
        start = RowStart(blocks=[], num_draft_tokens=runner.sizes.num_speculative_tokens)
        runner.start_rows([(row, start) for row in range(count)])
        runner.place({"num_computed_tokens": np.full(count, context(runner.sizes))})
        step = replace(step, state_rows=range(count))
    assert step.state_rows == range(count), step.state_rows
    return step, _requests(runner, count, step.shape, drawn)


def context(sizes: EngineSizes) -> int:
    """Count the tokens before those of a round: a block of them, if as many fit."""
    return max(min(BLOCK_SIZE, sizes.max_model_len - sizes.widest.rows), 0)


def _requests(
    runner: Runner, count: int, shape: DraftShape, drawn: np.random.Generator
) -> Callable[[], None]:
    """Draw the last token and all nodes of the first requests; return what writes them."""
    state = runner.state
    nodes = min(shape.nodes, runner.sizes.max_model_len - 1)  # none is after the longest context
    parent_X = np.arange(nodes) // max(shape.width, 1)  # a tree that is full, level by level
    tokens = drawn.integers(state.sampling.vocab_size, size=(count, 1 + nodes))
    found = {
        "last_sampled_tokens": tokens[:, 0],
        "num_nodes": np.full(count, nodes),
        "draft_tokens": tokens[:, 1:],
        "draft_parents": np.tile(parent_X, (count, 1)),
    }
    if state.draft_probs.shape[1]:
        found["draft_probs"] = np.full((count, nodes), 0.5, np.float32)
    computed = state.num_computed_tokens[:count]
    if runner.followers is not None:  # each run is told them; else it writes what lies there
        found["num_computed_tokens"] = computed.cpu().numpy()
        return partial(runner.place, found)
    places = [runner.rows_of(name, values.shape) for name, values in found.items()]
    values = [torch.tensor(value, device=runner.device) for value in found.values()]
    return partial(torch._foreach_copy_, [computed, *places], [computed.clone(), *values])
