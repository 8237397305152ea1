"""Short steps with prompts, which one graph serves: what it is padded to, whatever the sizes."""

import pytest
import torch

from specdec.config import GraphConfig
from specdec.rounds.upload import RowStart
from specdec.runner import Runner
from specdec.scheduling.work import PromptPart
from specdec.sizes import EngineSizes, chain
from tests.specdec.graph_walk import make_backend, prompt_of, tiny

K, RUNNING, PARTS = 2, range(5), [5]


@pytest.fixture(scope="module")
def results():
    """results(backend, request_sizes): of a step of five requests and a token of a prompt.

    All rows that eight requests may verify are shared out to the five.
    """
    pair = tiny("eagle3", torch.device("cpu"))
    sizes = EngineSizes(
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=1,
        num_kv_blocks=8,
        num_speculative_tokens=K,
        is_adaptive=True,
    )

    def run(backend, request_sizes):
        graphs = GraphConfig(request_sizes=request_sizes, token_sizes=(sizes.max_num_rows,))
        captures, device = make_backend(backend)
        runner = Runner(
            *(pair.target, pair.eagle, sizes, device), graph_config=graphs, backend=captures
        )
        runner.capture()
        for row in (*RUNNING, *PARTS):
            runner.start_rows([(row, RowStart(blocks=[row], num_draft_tokens=K))])
        for row in RUNNING:
            for at in range(3):
                runner.run_step(parts=[part(row, at)], next_shape=chain(K))
        shared = {"shape": chain(K), "shared_rows": sizes.max_verify_rows}
        parts = [part(row, 0) for row in PARTS]
        runner.run_step(RUNNING, parts, max_num_computed=8, next_shape=chain(K), **shared)
        result = runner.read(len(RUNNING) + len(PARTS))
        return result.sampled_tokens[: len(RUNNING)], result.draft_tokens, runner

    return run


def part(row, start):
    prompt = prompt_of(row)[:3]
    return PromptPart(state_row=row, prompt=prompt, start=start, length=1, blocks=[row])


@pytest.mark.parametrize("request_sizes", [(6, 8), (8,)])
def test_a_step_fills_no_more_rows_than_there_are(results, request_sizes):
    """The graphs may have more batch slots: of them no rows are decided."""
    *found, runner = results("tape", request_sizes)
    assert runner.graphs.counters()["target_prefill"].replays
    assert found == list(results("eager", request_sizes)[:-1])
