"""The EAGLE head's two ways through its levels: all in one pass, or one by one."""

import dataclasses

import pytest
import torch

from specdec.rounds.upload import RowStart
from specdec.scheduling.work import PromptPart
from specdec.sizes import chain
from tests.specdec.graph_walk import prompt_of, tiny, tiny_runner

K = 4


def drafts_of(pair, is_adaptive):
    """What is drafted after three prompts."""
    runner = tiny_runner(pair, K, is_adaptive=is_adaptive)
    parts = []
    for row in range(3):
        blocks = [2 * row, 2 * row + 1]
        runner.start_rows([(row, RowStart(blocks=blocks, num_draft_tokens=K))])
        prompt = prompt_of(row)
        whole = {"prompt": prompt, "start": 0, "length": len(prompt), "blocks": blocks}
        parts.append(PromptPart(state_row=row, **whole))
    runner.run_step(parts=parts, next_shape=chain(K))
    runner.read(len(parts))
    assert runner.state.num_nodes[:3].tolist() == [K] * 3
    return runner.state.draft_tokens[:3]


@pytest.mark.parametrize("draft", ["eagle3", "eagle1"])
@pytest.mark.parametrize("recycled", ["pre_norm", "post_norm"])
def test_levels_one_by_one_draft_what_one_pass_does(draft, recycled):
    pair = tiny(draft, torch.device("cpu"))
    config = dataclasses.replace(pair.eagle.config, recycled=recycled)
    pair = dataclasses.replace(pair, eagle=dataclasses.replace(pair.eagle, config=config))
    fixed, varying = (drafts_of(pair, is_adaptive) for is_adaptive in (False, True))
    assert torch.equal(fixed, varying)
    assert len(fixed.unique()) > K
