"""Requests are what their caller gave when he gave it, and refused ones leave no trace."""

import gc
import time
import weakref

import numpy as np
import pytest

from specdec import LLM, SamplingParams
from specdec.requests.intake import NewRequest
from specdec.sizes import MAX_STOP_IDS


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", max_num_seqs=2, max_model_len=128, device="cpu", seed=1) as made:
        yield made


@pytest.mark.parametrize(
    "made",
    [
        lambda ids: ids,
        lambda ids: np.array(ids),
        lambda ids: {"prompt_token_ids": ids},
        lambda ids: {"prompt_token_ids": np.array(ids), "prompt": "text"},
    ],
)
def test_a_caller_may_change_what_he_gave(llm, made):
    params, ids = SamplingParams(seed=7, max_tokens=1), [5, 6, 7]
    prompt = made(ids)
    new = NewRequest(prompt=prompt, params=params)
    params.seed = 8
    inner = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
    inner[0] = 9
    [request] = llm.engine.add_requests([new])
    llm.engine.abort_all()
    assert (request.prompt_token_ids, request.sampling.seed) == ([5, 6, 7], 7)


def test_a_request_arrives_when_it_is_made(llm):
    new = NewRequest(prompt=[5], params=SamplingParams(max_tokens=1))
    made = time.monotonic()
    time.sleep(0.01)
    [request] = llm.engine.add_requests([new])
    llm.engine.abort_all()
    assert 0 < made - request.stats.arrival_time < 1


def test_a_refused_request_takes_no_seed():
    sampled = SamplingParams(max_tokens=1)
    seeds = []
    for refused in ([], [[5], [10**9]]):
        with LLM("demo", max_model_len=128, device="cpu", seed=1) as made:
            if refused:
                with pytest.raises(ValueError, match="outside the target's vocabulary"):
                    made.generate(refused, sampled)
            outputs = made.generate([[5], [6]], sampled, use_tqdm=False)
            seeds.append([output.seed for output in outputs])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2


def test_as_many_stop_ids_as_min_tokens_can_mask_are_taken(llm):
    """An EOS that does not end the text is not masked."""
    ids = list(range(10, 10 + MAX_STOP_IDS))
    params = SamplingParams(max_tokens=1, min_tokens=1, stop_token_ids=ids)
    with pytest.raises(ValueError, match="min_tokens with more than 64"):
        llm.engine.add_requests([([5], params)])
    params.ignore_eos = True
    assert len(llm.engine.add_requests([([5], params)])) == 1
    llm.engine.abort_all()


def test_what_a_request_held_is_free_when_its_caller_drops_it(llm):
    """Without a garbage collection: thousands of requests would make one slow."""
    gc.collect()
    gc.disable()
    try:
        [request] = llm.engine.add_requests([("def f(", SamplingParams(max_tokens=2))])
        while llm.engine.has_unfinished:
            llm.engine.step()
        llm.engine.drain()
        seen = weakref.ref(request.detokenizer)
        del request
        assert seen() is None
    finally:
        gc.enable()
