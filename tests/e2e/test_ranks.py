"""Two ranks give the tokens, logprobs and drafts of one, and hold the same state in every step.

Each has a part of the heads, columns, experts and vocabulary.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from graphs.modes import CUDAGraphMode
from graphs.tape.backend import TapeBackend
from specdec import LLM, SamplingParams
from specdec.parallel import lead as leading
from specdec.parallel import processes
from specdec.parallel.processes import RankError
from specdec.start import load
from tests.block_pair import write_bigrams, write_parallel
from tests.shared_rows import at_random, rows_are_shared

SIZES = {"max_num_seqs": 5, "max_model_len": 256, "device": "cpu", "seed": 7}
RULES = [{"regex": r"(def|for) [a-z_]{3,9}\([a-z]{0,4}\):( [a-z]+)*"}, {"json": {"type": "object"}}]
GREEDY = {"temperature": 0.0}
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
ASKED = [
    GREEDY | {"logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.9, "top_p": 0.9, "seed": 1, "n": 2, "logprobs": 1},
    {
        "temperature": 0.7,
        "seed": 2,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.2,
        "bad_words": ["self"],
    },
    {
        "temperature": 1.0,
        "seed": 3,
        "min_p": 0.05,
        "logit_bias": {5: 2.0},
        "repetition_penalty": 1.2,
    },
    GREEDY | {"structured_outputs": RULES[0]},
    {"temperature": 0.8, "seed": 5, "structured_outputs": RULES[1]},
    GREEDY | {"min_tokens": 9, "stop_token_ids": [11, 12], "allowed_token_ids": range(9, 900)},
    {"temperature": 0.8, "seed": 4, "top_k": 20},
]


def chain_of(k, draft="demo", **more):
    return {"model": draft, "num_speculative_tokens": k, **more}


TREE = chain_of(4, "demo/eagle1", top_k=3, num_draft_tokens=9)


@pytest.fixture(scope="module")
def requests(prompts):
    """Prompts that share beginnings, and what is asked of them."""
    short = [prompt for prompt in prompts if len(prompt) < 64]
    texts = [(short[0] + short[2] + 2 * tail)[:119] for tail in short[3:7]]  # three blocks
    texts += [(tail + short[0])[:56] for tail in short[1:5]]  # they grow by a second one
    params = [SamplingParams(**{"max_tokens": 10, **each}) for each in ASKED]
    return texts, params


@pytest.fixture(scope="module", autouse=True)
def _compared():
    """Ranks compare the results of each step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_DEBUG", "1")
        yield


def outputs_of(llm, requests):
    outputs = llm.generate(*requests, use_tqdm=False)
    llm.engine.drain()
    return outputs


def told(outputs):
    return [
        ([(each.token_ids, each.logprobs) for each in output.outputs], output.prompt_logprobs)
        for output in outputs
    ]


def rounds_of(outputs):
    """What was drafted in each round, and how much of it was accepted."""
    return [each.stats._rounds for output in outputs for each in output.outputs]


@pytest.fixture(scope="module")
def expected(requests):
    """Texts of one rank without drafts."""
    return told(outputs_of(LLM("demo", **SIZES), requests))


def ranks(draft, size=2, model="demo", **options):
    return LLM(model, draft, **(SIZES | options), tensor_parallel_size=size)


def worker(llm):
    return llm.engine.runner.followers.processes._all[0].popen


CHUNKS = {"num_kv_blocks": 5, "max_num_batched_tokens": 48, "async_scheduling": True}


@pytest.fixture(scope="module")
def chains():
    """Few blocks, so that requests are preempted; chunks of prompts; steps ahead of results."""
    with ranks(chain_of(3), **CHUNKS) as llm:
        yield llm


def test_chains_are_those_of_one_rank(chains, requests, expected):
    outputs = outputs_of(chains, requests)
    assert told(outputs) == expected
    assert rounds_of(outputs) == rounds_of(outputs_of(ranks(chain_of(3), 1, **CHUNKS), requests))
    assert sum(each.stats.num_preemptions for each in outputs) > 0
    assert sum(each.stats.num_cached_tokens for each in outputs) > 0


def test_a_rank_that_differs_is_named_with_the_step(chains, requests, monkeypatch):
    """The other rank verifies a draft less."""
    real = leading.of_rows

    def of_rows(starts, grown):
        fewer = [(row, replace(start, num_draft_tokens=2)) for row, start in starts]
        return real(fewer, grown)

    monkeypatch.setattr(leading, "of_rows", of_rows)
    with pytest.raises(RankError, match=r"^rank 1 has other results of step \d+"):
        outputs_of(chains, requests)
    assert worker(chains).returncode is not None
    with pytest.raises(RankError, match="has other results"):
        outputs_of(chains, requests)


@pytest.fixture(scope="module")
def trees():
    with ranks(TREE, max_num_batched_tokens=64) as llm:
        yield llm


def test_trees_are_those_of_one_rank(trees, requests, expected):
    few = [each[2:6] for each in requests]
    outputs = outputs_of(trees, few)
    assert told(outputs) == expected[2:6]
    of_one = outputs_of(ranks(TREE, 1, max_num_batched_tokens=64), few)
    assert rounds_of(outputs) == rounds_of(of_one)
    assert trees.engine.runner.num_tree_rounds > 5


def test_a_rank_that_is_killed_while_requests_run_ends_the_engine(trees, requests):
    killing = threading.Timer(0.3, worker(trees).kill)
    killing.start()
    with pytest.raises(RankError, match=r"^rank 1 was ended by SIGKILL"):
        trees.generate(requests[0] * 3, LONG, use_tqdm=False)
    assert not trees.engine.has_unfinished
    with pytest.raises(RankError, match="rank 1 was ended by SIGKILL"):
        trees.generate(requests[0][0], use_tqdm=False)


@pytest.fixture(scope="module")
def auto():
    with rows_are_shared(), ranks(chain_of("auto"), async_scheduling=True) as llm:
        at_random(llm, random.Random(1))
        yield llm


def test_whatever_a_planner_chooses_is_done_by_both(auto, requests, expected):
    assert told(outputs_of(auto, requests)) == expected
    assert auto.engine.runner.num_tree_rounds > 0
    assert (auto.engine.planner.factors != 1).any()
    stats = auto.engine.planner.statistics
    assert 0 < stats.num_wasted < stats.num_rows


def test_ctrl_c_ends_the_ranks_that_run_a_step(auto, requests, monkeypatch):
    popen, sampler = worker(auto), auto.engine.runner.acts.sampler
    real, left = sampler.choose, [9]

    def choose(step):
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)
        real(step)

    monkeypatch.setattr(sampler, "choose", choose)
    with pytest.raises(KeyboardInterrupt):
        outputs_of(auto, requests)
    assert popen.poll() == -signal.SIGKILL
    with pytest.raises(RankError, match="a step was interrupted: KeyboardInterrupt"):
        outputs_of(auto, requests)


@pytest.mark.slow
def test_drafts_are_accepted_by_their_probabilities_as_on_one_rank(requests):
    draft, few = chain_of(3, acceptance="block"), [each[1:6] for each in requests]
    with ranks(draft) as llm:
        outputs = outputs_of(llm, few)
    of_one = outputs_of(ranks(draft, 1), few)
    assert told(outputs) == told(of_one)
    assert rounds_of(outputs) == rounds_of(of_one)


def test_experts_are_those_of_one_rank(requests):
    """The draft is whole on both ranks."""
    draft = chain_of(3, "demo-experts", draft_tensor_parallel_size=1)
    few = [each[:2] for each in requests]
    with ranks(draft, model="demo-experts") as llm:
        outputs = outputs_of(llm, few)
        assert llm.engine.runner.target.model.experts.num == 16
    of_one = outputs_of(ranks(draft, 1, "demo-experts"), few)
    assert told(outputs) == told(of_one)
    assert rounds_of(outputs) == rounds_of(of_one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "write, format", [(write_bigrams, "deepspec-dspark"), (write_parallel, "p-eagle")]
)
def test_blocks_that_each_rank_drafts_whole_are_those_of_one(
    tmp_path, requests, expected, write, format
):
    directory = write(tmp_path / "draft", format)
    draft = chain_of(3, str(directory), draft_tensor_parallel_size=1)
    with ranks(draft, **CHUNKS) as llm:
        outputs = outputs_of(llm, requests)
    assert told(outputs) == expected
    assert rounds_of(outputs) == rounds_of(outputs_of(ranks(draft, 1, **CHUNKS), requests))
    assert sum(each.stats.num_preemptions for each in outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("draft", [chain_of(3), TREE])
def test_graphs_of_both_ranks_repeat_their_transfers(draft, requests, expected, monkeypatch):
    """Rounds run as whole graphs and padded, steps with prompts in pieces."""
    monkeypatch.setattr(load, "graph_backend", lambda *_: TapeBackend())
    program = "from tests.specdec.parallel.tape_rank import main; main()"
    monkeypatch.setattr(processes, "PROGRAM", program)
    sizes = {"cuda_graph_sizes": [5], "cuda_graph_token_sizes": [256]}
    with ranks(draft | {"adaptive": False}, **sizes) as llm:
        outputs = outputs_of(llm, [each[:5] for each in requests])
        counters = llm.graph_counters()
    assert told(outputs) == expected[:5]
    replays = sum((each.replays for each in counters.values()), Counter())
    assert min(replays[mode] for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, chain_of(3), TREE])
def test_four_ranks_give_the_texts_of_one(draft, requests, expected):
    """Two of them share a kv head."""
    with ranks(draft, 4) as llm:
        outputs = outputs_of(llm, requests)
    assert told(outputs) == expected
    if draft is not None:
        assert rounds_of(outputs) == rounds_of(outputs_of(ranks(draft, 1), requests))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("draft", [None, chain_of(3), TREE | {"adaptive": False}, chain_of("auto")])
def test_two_gpus_give_the_texts_of_one(requests, draft, no_late_compilation):
    options = SIZES | {"device": "cuda", "num_kv_blocks": 64}
    with LLM("demo", draft, **options) as llm:
        of_one = told(outputs_of(llm, requests))
    with ranks(draft, **options) as llm:
        assert told(outputs_of(llm, requests)) == of_one
        assert told(outputs_of(llm, requests)) == of_one


def generate_for(llm, requests, seconds):
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        outputs_of(llm, requests)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_gpus_rank_that_ends_or_stops_ends_the_engine(requests, number):
    with ranks(chain_of("auto"), device="cuda", num_kv_blocks=64) as llm:
        os.kill(worker(llm).pid, number)
        with pytest.raises(RankError, match=r"^rank 1 (was ended by SIGKILL|has given no sign)"):
            generate_for(llm, requests, seconds=15)
