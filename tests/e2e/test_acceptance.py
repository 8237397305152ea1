"""Tokens stay right with a dead draft, so accepted counts are compared with two other sources."""

import pytest

from specdec import SamplingParams
from tests import naive_eagle
from tests.reference import Reference
from weights.demo import demo_directory

# from the pair's README, where a draft after the 160th token is not accepted
FIGURES = [
    ("demo/eagle3", 5, 1272, [884, 631, 458, 334, 256]),
    ("demo/eagle3", 3, 1486, [1070, 750, 528]),
    ("demo/eagle1", 3, 1273, [1038, 831, 692]),
]


def trimmed(stats, num_tokens):
    """Accepted counts per round, the last cut at the limit; the first token is in no round."""
    counts = []
    emitted = 1
    for count in stats.num_accepted:
        counts.append(min(count, num_tokens - emitted))
        emitted += counts[-1] + 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("draft, k, num_rounds, accepted", FIGURES)
def test_acceptance_equals_the_figures_of_the_pair(
    demo_llm, greedy, prompts, draft, k, num_rounds, accepted
):
    outputs = demo_llm(draft, k).generate(prompts[:24], greedy(160), use_tqdm=False)
    counts = [count for output in outputs for count in trimmed(output.stats, 160)]
    assert len(counts) == num_rounds
    assert [sum(count >= i for count in counts) for i in range(1, k + 1)] == accepted


def naive_pair(draft):
    target = Reference(demo_directory("target"))
    cfg, weights = naive_eagle.read_draft(
        demo_directory(draft), (2, 4, 5) if draft == "eagle3" else ()
    )
    return target, cfg, naive_eagle.borrow(cfg, weights, target.weights)


@pytest.mark.parametrize("draft, k", [("eagle3", 5), ("eagle1", 3)])
def test_every_round_equals_the_naive_draft(demo_llm, greedy, prompts, draft, k):
    target, cfg, weights = naive_pair(draft)
    for prompt in prompts[1:3]:
        naive = naive_eagle.generate(target, cfg, weights, prompt, 32, k)
        [output] = demo_llm(f"demo/{draft}", k).generate([prompt], greedy(32), use_tqdm=False)
        assert output.outputs[0].token_ids == naive.tokens
        assert trimmed(output.stats, 32) == naive.num_accepted


ALL, TOP_K = {"temperature": 1.0}, {"temperature": 1.5, "top_k": 2}


@pytest.mark.parametrize(
    "draft, k, values",
    [
        pytest.param("eagle3", 5, ALL, id="eagle3-5-all"),
        pytest.param("eagle1", 3, TOP_K, id="eagle1-3-top_k"),
        pytest.param("eagle3", 5, TOP_K, id="eagle3-5-top_k", marks=pytest.mark.slow),
        pytest.param("eagle1", 3, ALL, id="eagle1-3-all", marks=pytest.mark.slow),
    ],
)
def test_every_sampled_round_equals_the_naive_draft_with_the_public_noise(
    demo_llm, prompts, draft, k, values
):
    pair = naive_pair(draft)
    mean = []
    for seed, prompt in ((11, prompts[1]), (2**63 + 12, prompts[2])):
        naive = naive_eagle.generate(*pair, prompt, 20, k, naive_eagle.sampled(seed=seed, **values))
        params = SamplingParams(seed=seed, max_tokens=20, ignore_eos=True, **values)
        [output] = demo_llm(f"demo/{draft}", k).generate([prompt], params, use_tqdm=False)
        assert output.outputs[0].token_ids == naive.tokens
        assert trimmed(output.stats, 20) == naive.num_accepted
        mean.append(output.stats.mean_acceptance_length)
    assert min(mean) > 1.2  # noise that the target does not share accepts hardly anything
