"""Tokens stay right with a dead draft, so accepted counts are compared with two other sources."""

from functools import partial

import pytest

from specdec import LLM, SamplingParams
from tests import naive_block, naive_eagle
from tests.reference import Reference
from weights.demo import demo_directory

NAMES = {"eagle3": "demo/eagle3", "eagle1": "demo/eagle1", "dspark": "demo-dspark"}
# from the pair's README, where a draft after the 160th token is not accepted
FIGURES = [
    ("eagle3", 5, 1272, [884, 631, 458, 334, 256]),
    ("eagle3", 3, 1486, [1070, 750, 528]),
    ("eagle1", 3, 1273, [1038, 831, 692]),
    ("dspark", 3, 1092, [984, 911, 848]),
    ("dspark", 6, 751, [655, 593, 541, 479, 439, 378]),
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
    demo_llm, greedy, prompts, references, draft, k, num_rounds, accepted
):
    outputs = demo_llm(NAMES[draft], k).generate(prompts[:24], greedy(160), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == references
    assert counted(outputs, 160, k) == (num_rounds, accepted)


def test_a_block_of_the_dspark_head_is_accepted_as_it_was_in_training(
    demo_llm, greedy, prompts, references
):
    """A round gives 4.2 tokens; without the markov head 2.3, with taps one boundary early 3.6."""
    outputs = demo_llm(NAMES["dspark"], 6).generate(prompts[:4], greedy(40), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [t[:40] for t in references[:4]]
    assert counted(outputs, 40, 6) == (38, [31, 26, 22, 18, 13, 12])


@pytest.mark.slow
@pytest.mark.parametrize("temperature, least", [(0.0, 1.12), (1.0, 1.18)])
def test_trees_of_the_dspark_head_accept_more_than_its_chains(
    demo_llm, prompts, temperature, least
):
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=160, ignore_eos=True)
    draft = {"model": NAMES["dspark"], "num_speculative_tokens": 6}
    sizes = {"device": "cpu", "max_num_seqs": 24, "max_model_len": 512}
    tree = LLM("demo", draft | {"top_k": 4, "num_draft_tokens": 16}, **sizes)
    plain, chains, trees = (
        llm.generate(prompts[:24], params, use_tqdm=False)
        for llm in (demo_llm(None), demo_llm(NAMES["dspark"], 6), tree)
    )
    texts = [[each.outputs[0].token_ids for each in found] for found in (plain, chains, trees)]
    assert texts[1:] == texts[:1] * 2
    of_chains, of_trees = (LLM.run_stats(found).mean_acceptance_length for found in (chains, trees))
    assert of_trees >= least * of_chains


def counted(outputs, num_tokens, k):
    """How many rounds there are, and how many of them accept at each place."""
    counts = [count for output in outputs for count in trimmed(output.stats, num_tokens)]
    return len(counts), [sum(count >= i for count in counts) for i in range(1, k + 1)]


def naive_pair(draft):
    """naive(prompt, num_tokens, k, *scores): text and rounds."""
    target, directory = Reference(demo_directory("target")), demo_directory(draft)
    naive = naive_block if draft == "dspark" else naive_eagle
    if draft == "dspark":
        cfg, weights = naive_block.read_draft(directory, target.num_layers)
    else:
        cfg, weights = naive_eagle.read_draft(directory, (2, 4, 5) if draft == "eagle3" else ())
    return partial(naive.generate, target, cfg, naive_eagle.borrow(cfg, weights, target.weights))


@pytest.mark.parametrize("draft, k", [("eagle3", 5), ("eagle1", 3), ("dspark", 6)])
def test_every_round_equals_the_naive_draft(demo_llm, greedy, prompts, draft, k):
    generate = naive_pair(draft)
    for prompt in prompts[1:3]:
        naive = generate(prompt, 32, k)
        [output] = demo_llm(NAMES[draft], k).generate([prompt], greedy(32), use_tqdm=False)
        assert output.outputs[0].token_ids == naive.tokens
        assert trimmed(output.stats, 32) == trimmed(naive, 32)


ALL, TOP_K = {"temperature": 1.0}, {"temperature": 1.5, "top_k": 2}


@pytest.mark.parametrize(
    "draft, k, values",
    [
        pytest.param("eagle3", 5, ALL, id="eagle3-5-all"),
        pytest.param("eagle1", 3, TOP_K, id="eagle1-3-top_k"),
        pytest.param("dspark", 6, ALL, id="dspark-6-all", marks=pytest.mark.slow),
        pytest.param("eagle3", 5, TOP_K, id="eagle3-5-top_k", marks=pytest.mark.slow),
        pytest.param("eagle1", 3, ALL, id="eagle1-3-all", marks=pytest.mark.slow),
    ],
)
def test_every_sampled_round_equals_the_naive_draft_with_the_public_noise(
    demo_llm, prompts, draft, k, values
):
    generate = naive_pair(draft)
    mean = []
    for seed, prompt in ((11, prompts[1]), (2**63 + 12, prompts[2])):
        naive = generate(prompt, 20, k, naive_eagle.sampled(seed=seed, **values))
        params = SamplingParams(seed=seed, max_tokens=20, ignore_eos=True, **values)
        [output] = demo_llm(NAMES[draft], k).generate([prompt], params, use_tqdm=False)
        assert output.outputs[0].token_ids == naive.tokens
        assert trimmed(output.stats, 20) == trimmed(naive, 20)
        mean.append(output.stats.mean_acceptance_length)
    assert min(mean) > 1.2  # noise that the target does not share accepts hardly anything
