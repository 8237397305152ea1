"""The pair with experts: its text, its rounds and its figures are those of the naive reference."""

import pytest
import torch

from specdec import LLM, SamplingParams
from tests import naive_eagle
from tests.reference import Reference, linear
from weights.demo import demo_directory

TAPS = (2, 4, 5)
# from the pair's README, where a draft after the 160th token is not accepted
FIGURES = [(5, 948, [804, 646, 518, 476, 440]), (3, 1195, [1042, 870, 725])]


@pytest.fixture(scope="module")
def target():
    return Reference(demo_directory("experts/target"))


@pytest.fixture(scope="module")
def naive(target):
    """naive(prompt, num_tokens, K): text and rounds."""
    cfg, weights = naive_eagle.read_draft(demo_directory("experts/eagle3"), TAPS)
    weights = naive_eagle.borrow(cfg, weights, target.weights)
    return lambda *args: naive_eagle.generate(target, cfg, weights, *args)


def llm(K):
    draft = {"model": "demo-experts", "num_speculative_tokens": K} if K else None
    sizes = {"max_num_seqs": 24, "max_model_len": 512}
    return LLM("demo-experts", draft, device="cpu", **sizes)


def rounds(stats, num_tokens):
    """Accepted counts, the last cut at the limit; the first token is in no round."""
    counts, emitted = [], 1
    for count in stats.num_accepted:
        counts.append(min(count, num_tokens - emitted))
        emitted += counts[-1] + 1
    return counts


@pytest.mark.parametrize("K", [3, 5])
def test_every_round_equals_the_naive_draft(naive, greedy, prompts, K):
    outputs = llm(K).generate(prompts[1:4], greedy(32), use_tqdm=False)
    for prompt, output in zip(prompts[1:4], outputs, strict=True):
        expected = naive(prompt, 32, K)
        assert output.outputs[0].token_ids == expected.tokens
        assert rounds(output.stats, 32) == expected.num_accepted


@pytest.mark.slow
def test_drafts_and_neighbours_change_no_token(greedy, prompts):
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True)
    texts = []
    for K in (0, 3, 5):
        engine = llm(K)
        for params in (greedy(16), sampled):
            found = engine.generate(prompts[:4], params, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in found])
        [alone] = engine.generate([prompts[3]], greedy(16), use_tqdm=False)
        assert alone.outputs[0].token_ids == texts[0][3]
    assert texts[0::2] == [texts[0]] * 3
    assert texts[1::2] == [texts[1]] * 3
    assert texts[0] != texts[1]


def test_all_experts_of_all_layers_are_chosen(target, prompts):
    shares = torch.zeros(8, 16)
    for prompt in prompts[::3]:
        boundaries = target.forward(prompt).boundaries
        for i, share_E in enumerate(shares):
            name = f"layers.{i}.mlp"
            share_E += chosen(target, name, boundaries[i])
    shares /= shares.sum(1, keepdim=True)
    assert float(shares.min()) > 0.002
    assert float(shares.max()) < 0.2


def chosen(target, name, stream_TD):
    """Count how often each expert is chosen, [E]."""
    x_TD = target.norm(name.replace("mlp", "input_layernorm"), stream_TD)
    added = naive_eagle.attention(
        target.layer, target.weights, name.replace("mlp", "self_attn"), x_TD
    )
    x_TD = target.norm(name.replace("mlp", "post_attention_layernorm"), stream_TD + added)
    ids_TE = linear(target.weights, f"{name}.gate", x_TD).topk(4).indices
    return torch.bincount(ids_TE.flatten(), minlength=16)


@pytest.mark.slow
@pytest.mark.parametrize("K, num_rounds, accepted", FIGURES)
def test_acceptance_equals_the_figures_of_the_pair(greedy, prompts, K, num_rounds, accepted):
    outputs = llm(K).generate(prompts[:24], greedy(160), use_tqdm=False)
    counts = [count for output in outputs for count in rounds(output.stats, 160)]
    assert len(counts) == num_rounds
    assert [sum(count >= i for count in counts) for i in range(1, K + 1)] == accepted
