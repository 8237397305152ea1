"""The distribution of generated text: three tokens of a tiny pair, for many seeds, by each rule.

Chi-square at a false-alarm rate of 1e-9 against the reference's probabilities, with controls that
must fail.
"""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from specdec.drafts import eagle as draft
from specdec.drafts import perturbation as noise
from specdec.kernels.gumbel import uniform_ref
from specdec.requests.params import SamplingFlags, SamplingStart
from specdec.rounds.propose import propose_level
from specdec.rounds.upload import RowStart
from specdec.runner import Runner
from specdec.sampler import sampler as choice
from specdec.sampler.sampler import scaled_in_support
from specdec.scheduling.work import PromptPart
from specdec.sizes import EngineSizes
from tests.specdec.tiny_pair import changed, on_disk, random_draft
from tests.weights.blocks import DFLASH2, DSPARK, block_config
from tests.weights.tiny import eagle3_config, tiny_target

K = 2
V = 8
ROWS = 256
FEW = 4 * ROWS  # draws of the fast cases, in which every control fails
LENGTH = 3
PROMPT = [5, 2]
TEMPERATURE = 1.4
LIMITS = (6, 0.9)  # top_k, top_p
NEEDS = SamplingFlags(noise=True, floor=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = on_disk(
        tmp_path_factory.mktemp("target"), changed(tiny_target("llama").config, vocab_size=V)
    )
    return target, random_draft(eagle3_config(target.loaded, draft_vocab_size=V - 1))


@pytest.fixture(scope="module")
def law(pair):
    return law_of_texts(pair, LIMITS)


def law_of_texts(pair, limits):
    """The probability of every text of three tokens, in float64."""
    found = {}
    stack = [((), 1.0)]
    while stack:
        tokens, probability = stack.pop()
        if len(tokens) == LENGTH:
            found[tokens] = probability
            continue
        after = next_law(pair[0].reference, [*PROMPT, *tokens], *limits)
        stack += [((*tokens, t), probability * p) for t, p in after.items()]
    return found


def next_law(reference, tokens, top_k, top_p):
    x = reference.forward(tokens).logits_TV[-1].double().numpy() / TEMPERATURE
    kept = np.argsort(-x)[: top_k or V]
    probs = np.exp(x[kept] - x[kept[0]])
    probs /= probs.sum()
    num = int((np.cumsum(probs) - probs < top_p).sum())
    return dict(zip(kept[:num].tolist(), probs[:num] / probs[:num].sum(), strict=True))


def draw(pair, rule, num_draws, temperature=TEMPERATURE, limits=LIMITS, spoil=lambda runner: None):
    """How often each text was drawn for seeds 0..num_draws - 1, and accepted drafts per round."""
    sizes = EngineSizes(
        max_model_len=64,
        max_num_seqs=ROWS,
        max_num_batched_tokens=ROWS * len(PROMPT),
        num_kv_blocks=ROWS,
        num_speculative_tokens=K,
        block_rows=pair[1].config.block_rows(K),
    )
    runner = Runner(pair[0].loaded, pair[1], sizes, torch.device("cpu"), acceptance=rule)
    counts = Counter()
    accepted = []
    for first in range(0, num_draws, ROWS):
        texts = [[] for _ in range(ROWS)]
        for row in range(ROWS):
            seed = (first + row) * 0x9E3779B97F4A7C15 % 2**64
            start = SamplingStart(
                temperature=temperature, top_k=limits[0], top_p=limits[1], seed=seed
            )
            runner.start_rows([(row, RowStart(blocks=[row], num_draft_tokens=K, sampling=start))])
        parts = [
            PromptPart(state_row=r, prompt=PROMPT, start=0, length=len(PROMPT), blocks=[r])
            for r in range(ROWS)
        ]
        runner.run_step(parts=parts, flags=NEEDS)
        for row, (token, *_) in enumerate(runner.read(ROWS).sampled_tokens):
            texts[row].append(token)
        while min(map(len, texts)) < LENGTH:
            spoil(runner)
            runner.run_step(list(range(ROWS)), max_num_computed=32, flags=NEEDS)
            result = runner.read(ROWS)
            for row, (tokens, count) in enumerate(
                zip(result.sampled_tokens, result.num_accepted, strict=True)
            ):
                texts[row] += tokens[: count + 1]
            accepted += result.num_accepted
        counts.update(tuple(text[:LENGTH]) for text in texts)
    return counts, sum(accepted) / len(accepted)


def excess(counts, law):
    """Chi-square over its quantile of 1 - 1e-9 (Wilson and Hilferty); cells below 5 are merged."""
    total = sum(counts.values())
    if set(counts) - set(law):
        return math.inf
    large = [text for text, p in law.items() if p * total >= 5]
    rest = 1 - sum(law[text] for text in large)
    terms = [(counts[text] - law[text] * total) ** 2 / (law[text] * total) for text in large]
    if rest * total >= 1:
        others = total - sum(counts[text] for text in large)
        terms.append((others - rest * total) ** 2 / (rest * total))
    df = len(terms) - 1
    return sum(terms) / (df * (1 - 2 / (9 * df) + 5.998 * math.sqrt(2 / (9 * df))) ** 3)


def shift(runner):
    """Tell the rule that every draft token had the probability of its neighbour."""
    runner.state.draft_scores.copy_(runner.state.draft_scores.roll(1, -1))


RULES = ["exact", "rejection", "block"]
DRAWS = [FEW, pytest.param(100_096, marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_draws", DRAWS)
@pytest.mark.parametrize("rule", RULES)
def test_three_tokens_have_the_targets_law(pair, law, rule, num_draws):
    counts, num_accepted = draw(pair, rule, num_draws)
    assert len(law) > 20
    assert excess(counts, law) < 1
    assert num_accepted > 0.1


@pytest.fixture(scope="module")
def blocks(pair):
    """blocks(**changes): the same target, with a parallel draft."""

    def make(**changes):
        config_of = eagle3_config if "mask_token_id" in changes else block_config
        return pair[0], random_draft(config_of(pair[0].loaded, **changes))

    return make


PEAGLE = {"mask_token_id": 7, "num_layers": 2, "draft_vocab_size": V - 1}
BLOCKS = [DSPARK, {}, DSPARK | {"markov": "rnn", "anchor_proposes": False}, DFLASH2, PEAGLE]
OF_BLOCKS = [(rule, i, FEW) for rule in RULES for i in range(len(BLOCKS))]
OF_BLOCKS += [("exact", 1, 100_096), ("rejection", 0, 100_096), ("block", 2, 100_096)]
OF_BLOCKS += [("block", 4, 100_096)]


@pytest.mark.slow
@pytest.mark.parametrize("rule, kind, num_draws", OF_BLOCKS)
def test_three_tokens_have_the_targets_law_after_block_drafts(blocks, law, rule, kind, num_draws):
    counts, num_accepted = draw(blocks(**BLOCKS[kind]), rule, num_draws)
    assert excess(counts, law) < 1
    assert num_accepted > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", range(len(BLOCKS)))
def test_a_false_law_of_block_drafts_is_seen(blocks, law, rule, kind):
    counts, _ = draw(blocks(**BLOCKS[kind]), rule, FEW, spoil=shift)
    assert excess(counts, law) > 1


@pytest.mark.parametrize(
    "rule", ["exact", *(pytest.param(rule, marks=pytest.mark.slow) for rule in RULES[1:])]
)
def test_another_temperature_is_seen(pair, law, rule):
    counts, _ = draw(pair, rule, FEW, temperature=TEMPERATURE * 0.6)
    assert excess(counts, law) > 1


@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
def test_a_false_law_of_the_drafts_is_seen(pair, law, rule):
    counts, _ = draw(pair, rule, FEW, spoil=shift)
    assert excess(counts, law) > 1


# each leaves two or three of the eight tokens, and the draft as few of its own
NARROW = [(3, 1.0), (0, 0.5), (3, 0.7)]


@pytest.mark.parametrize(
    "rule, limits",
    [
        pytest.param("rejection", NARROW[0], id="rejection-top_k"),
        pytest.param("block", NARROW[1], id="block-top_p"),
        pytest.param("rejection", NARROW[1], id="rejection-top_p", marks=pytest.mark.slow),
        pytest.param("block", NARROW[0], id="block-top_k", marks=pytest.mark.slow),
        pytest.param("rejection", NARROW[2], id="rejection-both", marks=pytest.mark.slow),
        pytest.param("block", NARROW[2], id="block-both", marks=pytest.mark.slow),
    ],
)
def test_narrow_limits_keep_the_targets_law(pair, rule, limits):
    counts, num_accepted = draw(pair, rule, FEW, limits=limits)
    assert excess(counts, law_of_texts(pair, limits)) < 1
    assert 0.4 < num_accepted < 0.8


@pytest.mark.parametrize("rule", [pytest.param("rejection", marks=pytest.mark.slow), "block"])
def test_drafts_whose_probabilities_are_kept_without_their_limits_are_seen(pair, rule, monkeypatch):
    def without_floor(logits_TV, temperature_T, floor_T):
        return scaled_in_support(logits_TV, temperature_T, torch.full_like(floor_T, -torch.inf))

    monkeypatch.setattr(noise, "scaled_in_support", without_floor)
    counts, _ = draw(pair, rule, FEW, limits=NARROW[0])
    assert excess(counts, law_of_texts(pair, NARROW[0])) > 2


@pytest.mark.parametrize("rule", RULES[1:])
def test_no_coin_or_draft_of_a_round_reuses_the_noise_of_an_earlier_one(pair, rule, monkeypatch):
    coins = []
    places = []

    def toss(*place):
        coins.append(uniform_ref(*place).view(ROWS, K + 1))
        return coins[-1].view(-1)

    def propose(normed_BD, weight_WD, to, draw, factor):
        def noted(logits_BW):
            noise = draw(logits_BW)
            keys = noise.noise_keys
            places.append(torch.stack([keys.positions, keys.epochs], dim=1))
            return noise

        propose_level(normed_BD, weight_WD, to, noted, factor)

    monkeypatch.setattr(choice, "uniform_ref", toss)
    monkeypatch.setattr(draft, "propose_level", propose)
    draw(pair, rule, ROWS)
    tossed_BX = torch.cat(coins, dim=1)
    places_BX2 = torch.stack(places, dim=1)
    for row in range(ROWS):
        assert len(tossed_BX[row].unique()) == tossed_BX.shape[1]
        assert len(places_BX2[row].unique(dim=0)) == places_BX2.shape[1]
    assert tossed_BX.shape[1] > K + 1
