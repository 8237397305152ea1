"""Engines whose heads are cut, in turns: tokens, logprobs and drafts are those of a whole head.

All else is whole on every rank, and so is each product: only what follows the head is on trial.
"""

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.kernels import best_token, linear
from specdec.kernels.linear import linear_ref
from tests.specdec.fake_ranks import FakeRanks

SIZE = 2
SETTINGS = {
    "plain": {},
    "chain": {"num_speculative_tokens": 3},
    "tree": {"num_speculative_tokens": 3, "top_k": 4, "num_draft_tokens": 8},
    "block": {"num_speculative_tokens": 3, "acceptance": "block"},
}
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3, "min_tokens": 8},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9, "prompt_logprobs": 1},
    {"temperature": 1.2, "seed": 2, "top_k": 30, "repetition_penalty": 1.2, "logit_bias": {9: 4.0}},
    {"temperature": 0.9, "seed": 3, "min_p": 0.05, "frequency_penalty": 0.5, "bad_words": ["e"]},
    {"temperature": 0.7, "seed": 4, "structured_outputs": {"regex": "[a-z ]{5,30}"}},
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_requests_get_knows_no_ranks(setting, prompts, monkeypatch):
    speculation = {"model": "demo/eagle3", "adaptive": False, **SETTINGS[setting]}
    options = {"max_num_seqs": 8, "max_model_len": 256, "device": "cpu", "enforce_eager": True}
    params = [SamplingParams(max_tokens=10, **each) for each in PARAMS]
    heads = {}

    def product(x_TK, weight_NK, bias_N, out_dtype):
        whole, columns = heads.get(weight_NK.data_ptr(), (weight_NK, slice(None)))
        return linear_ref(x_TK, whole, bias_N, out_dtype)[:, columns].contiguous()

    for module in (linear, best_token):
        monkeypatch.setattr(module, "linear_ref", product)

    def cut(owner, model, rank):
        whole = model.lm_head.weight.data
        owner.cut = rank.cut(len(whole))
        columns = slice(owner.cut.ids.start, owner.cut.ids.stop)
        model.lm_head.weight = torch.nn.Parameter(whole[columns].clone(), requires_grad=False)
        heads[model.lm_head.weight.data_ptr()] = (whole, columns)

    def generated(rank=None):
        llm = LLM("demo", speculation if setting != "plain" else None, **options)
        if rank is not None:
            acts = llm.engine.runner.acts
            cut(acts.sampler, acts.target.model, rank)
            if acts.draft is not None:
                cut(acts.draft, acts.draft.model, rank)
        outputs = llm.generate(prompts[: len(params)], params, use_tqdm=False)
        found = [
            (each.outputs[0].token_ids, each.outputs[0].logprobs, each.prompt_logprobs)
            for each in outputs
        ]
        return found, [each.outputs[0].stats._rounds for each in outputs]

    whole = generated()
    ranks = FakeRanks(SIZE)
    for found in ranks.run(generated):
        assert found == whole
    assert ranks.round > 10
