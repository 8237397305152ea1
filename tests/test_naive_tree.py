"""The naive tree: the demo's figures, what the rule says of every round, plain decoding's text."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from tests import naive_eagle
from tests.naive_eagle import borrow, draft_logits, gumbel, read_draft, sampled, target_features
from tests.naive_tree import (
    GREEDY,
    ROOT,
    DraftRow,
    Sampling,
    Shape,
    TreeDecoding,
    draft_tree,
    generate,
)
from tests.reference import Cache, Reference

DEMO = Path(__file__).parent.parent / "weights" / "demo"
RECORDED = json.loads((DEMO / "prompts.json").read_text())
TAPS = {"eagle3": (2, 4, 5), "eagle1": ()}
SAMPLED = Sampling(temperature=0.7, seed=2**40 + 7)


@pytest.fixture(scope="module")
def target():
    return Reference(DEMO / "target")


@pytest.fixture(scope="module")
def drafts(target):
    pairs = {name: read_draft(DEMO / name, taps) for name, taps in TAPS.items()}
    return {name: (cfg, borrow(cfg, own, target.weights)) for name, (cfg, own) in pairs.items()}


@pytest.fixture(scope="module")
def decode(target, drafts):
    def run(draft, index, shape, num_tokens, sampling=GREEDY):
        prompt = RECORDED["prompts"][index]
        return generate(TreeDecoding(target, *drafts[draft], prompt, shape, sampling), num_tokens)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft, shape, num_rounds, accepted_at",
    [
        ("eagle3", Shape(8, 6, 4), 1124, [888, 641, 458, 339, 216, 168]),
        ("eagle3", Shape(16, 6, 4), 1086, [861, 637, 467, 356, 241, 187]),
        ("eagle3", Shape(32, 8, 8), 1024, [801, 602, 443, 336, 244, 184, 107, 93]),
        ("eagle1", Shape(8, 6, 4), 889, [802, 619, 493, 408, 340, 283]),
        ("eagle1", Shape(16, 6, 4), 799, [738, 636, 507, 439, 379, 337]),
        ("eagle1", Shape(32, 8, 8), 666, [635, 561, 472, 398, 337, 302, 249, 216]),
    ],
)
def test_the_demo_pair_reaches_its_figures(decode, draft, shape, num_rounds, accepted_at):
    runs = [decode(draft, i, shape, 160) for i in range(24)]
    assert [run.tokens for run in runs] == RECORDED["greedy_float32"]
    assert sum(len(run.rounds) for run in runs) == num_rounds
    assert total_accepted_at(runs, shape) == accepted_at


@pytest.mark.slow
@pytest.mark.parametrize("temperature, of_tree, of_chain", [(0.7, 2.83, 2.60), (1.0, 2.55, 2.24)])
def test_sampled_trees_accept_more_than_chains_of_as_many_rows(
    decode, temperature, of_tree, of_chain
):
    def acceptance_length(shape):
        runs = [decode("eagle3", i, shape, 160, Sampling(temperature, seed=i)) for i in range(48)]
        return 1 + sum(sum(run.num_accepted) for run in runs) / sum(len(run.rounds) for run in runs)

    tree, chain = acceptance_length(Shape(8, 8, 4)), acceptance_length(Shape(8, 7, 1))
    assert (tree, chain) == pytest.approx((of_tree, of_chain), abs=0.1)  # other seeds: about 0.05
    assert tree > 1.06 * chain


@pytest.mark.parametrize(
    "draft, shape, sampling, num_rounds, accepted_at",
    [
        ("eagle3", Shape(8, 6, 4), GREEDY, 17, [16, 13, 11, 3, 2, 2]),
        pytest.param(
            *("eagle1", Shape(16, 6, 4), GREEDY, 16, [14, 13, 8, 6, 4, 2]), marks=pytest.mark.slow
        ),
        ("eagle3", Shape(16, 8, 4), SAMPLED, 19, [16, 11, 7, 3, 2, 2, 2, 2]),
    ],
)
def test_two_short_prompts_reach_their_figures(
    decode, draft, shape, sampling, num_rounds, accepted_at
):
    runs = [decode(draft, i, shape, 32, sampling) for i in (1, 2)]
    assert sum(len(run.rounds) for run in runs) == num_rounds
    assert total_accepted_at(runs, shape) == accepted_at


def total_accepted_at(runs, shape):
    counts = (run.num_accepted_at(shape.num_levels) for run in runs)
    return [sum(each) for each in zip(*counts, strict=True)]


@pytest.mark.parametrize(
    "draft, shape, sampling",
    [
        ("eagle3", Shape(8, 6, 4), SAMPLED),
        ("eagle3", Shape(3, 1, 8), GREEDY),
        ("eagle1", Shape(16, 4, 2), SAMPLED),
        pytest.param("eagle3", Shape(8, 6, 4), GREEDY, marks=pytest.mark.slow),
        pytest.param("eagle3", Shape(3, 1, 8), SAMPLED, marks=pytest.mark.slow),
        pytest.param("eagle1", Shape(16, 4, 2), GREEDY, marks=pytest.mark.slow),
    ],
)
def test_the_text_is_that_of_plain_decoding(target, decode, draft, shape, sampling):
    run = decode(draft, 6, shape, 20, sampling)
    assert run.tokens == plain(target, RECORDED["prompts"][6], 20, sampling)
    assert sum(run.num_accepted) > 4
    assert (run.tokens == RECORDED["greedy_float32"][6][:20]) == (sampling == GREEDY)


def plain(target, prompt, num_tokens, sampling):
    tokens, cache, ids_V = list(prompt), Cache(), torch.arange(4096)
    if sampling.temperature == 0:
        return target.greedy(prompt, num_tokens)
    while len(tokens) < len(prompt) + num_tokens:
        logits_V = target.forward(tokens[len(tokens) - 1 if cache else 0 :], cache).logits_TV[-1]
        tokens.append(int(sampled(*sampling)(logits_V, len(tokens), ids_V).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "draft, num_drafts, sampling",
    [
        ("eagle3", 4, SAMPLED),
        ("eagle1", 3, GREEDY),
        pytest.param("eagle3", 4, GREEDY, marks=pytest.mark.slow),
        pytest.param("eagle1", 3, SAMPLED, marks=pytest.mark.slow),
    ],
)
def test_one_child_a_node_makes_the_chain(target, drafts, decode, draft, num_drafts, sampling):
    tree = decode(draft, 2, Shape(num_drafts + 1, num_drafts, 1), 14, sampling)
    scores = sampled(*sampling) if sampling.temperature else naive_eagle.greedy
    chain = naive_eagle.generate(
        target, *drafts[draft], RECORDED["prompts"][2], 14, num_drafts, scores
    )
    assert (tree.tokens, tree.num_accepted) == (chain.tokens, chain.num_accepted)
    for each in tree.rounds:
        scores_KW = from_scratch(target, drafts[draft], each.tokens, num_drafts, scores=scores)
        chosen = [naive_eagle.target_id(*drafts[draft], scores_W) for scores_W in scores_KW]
        assert [node.token for node in each.tree.nodes] == chosen
        assert [node.parent for node in each.tree.nodes] == [ROOT, *range(num_drafts - 1)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("draft", ["eagle3", "eagle1"])
def test_children_are_the_best_that_a_draft_without_cache_finds(
    target, drafts, decode, draft, sampling
):
    shape = Shape(12, 3, 3)
    each = decode(draft, 6, shape, 10, sampling).rounds[2]
    ids_W = naive_eagle.draft_ids(*drafts[draft])
    nodes = each.tree.nodes
    for parent in {node.parent for node in nodes}:
        path = each.tree.path(parent)
        logits_W = from_scratch(target, drafts[draft], each.tokens, len(path) + 1, path)[-1]
        noise_W = gumbel(sampling.seed, len(each.tokens) + len(path), ids_W)
        perturbed_W = logits_W + sampling.temperature * noise_W
        score = 0.0 if parent == ROOT else nodes[parent].score
        expected = (score + perturbed_W.log_softmax(-1)).topk(shape.top_k)
        children = [node for node in nodes if node.parent == parent]
        assert [child.token for child in children] == ids_W[expected.indices].tolist()
        assert [child.score for child in children] == pytest.approx(
            expected.values.tolist(), abs=1e-4
        )
        assert {child.depth for child in children} == {len(path) + 1}


def from_scratch(target, pair, tokens, num_steps, teacher=(), scores=naive_eagle.greedy):
    """naive_eagle's logits, or scores, of a chain after these tokens."""
    outputs = target.forward(tokens[:-1])
    features_TE = target_features(pair[0], outputs.boundaries, outputs.hidden_TD)
    return draft_logits(*pair, tokens, features_TE, num_steps, teacher, scores)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("shape", [Shape(8, 4, 4), Shape(24, 3, 3), Shape(5, 1, 3)])
def test_every_round_follows_the_rule(decode, shape, sampling):
    for each in decode("eagle3", 6, shape, 12, sampling).rounds:
        assert_levels(each.tree, shape)
        assert_kept(each.tree, shape)
        assert_walk(each)


def assert_levels(tree, shape):
    """Each level has the children of the best nodes of the one before it."""
    levels = [list(group) for _, group in itertools.groupby(tree.nodes, lambda node: node.depth)]
    k = shape.top_k
    assert [len(level) for level in levels] == [k] + [k * k] * (shape.num_levels - 1)
    for above, level in itertools.pairwise(levels):
        best = sorted(above, key=lambda node: -node.score)[:k]
        assert [tree.nodes[node.parent] for node in level] == [
            each for each in best for _ in range(k)
        ]
        assert all(node.score <= tree.nodes[node.parent].score for node in level)


def assert_kept(tree, shape):
    """The best nodes, with their ancestors, which come first."""
    scores = sorted((node.score for node in tree.nodes), reverse=True)
    assert [tree.nodes[i].score for i in tree.kept] == scores[: shape.num_rows - 1]
    rows = tree.rows()
    assert [node.token for node in rows] == [tree.nodes[i].token for i in tree.kept]
    assert all(node.parent <= row for row, node in enumerate(rows))
    depths = [0, *(node.depth for node in rows)]
    assert all(node.depth == depths[node.parent] + 1 for node in rows)


def assert_walk(each):
    parents = [each.tree.nodes[i].parent for i in each.walk]
    assert parents == [ROOT, *each.walk][:-1]
    assert set(each.walk) <= set(each.tree.kept)
    end = each.walk[-1] if each.walk else ROOT
    beside = {each.tree.nodes[i].token for i in each.tree.kept if each.tree.nodes[i].parent == end}
    assert each.last_token not in beside


def test_a_tree_by_hand():
    tree = tree_of({None: (0.5, 0.3, 0.2), 0: (0.62, 0.28, 0.1), 1: (0.9, 0.05, 0.05)}, (4, 2, 2))
    assert [tree.path(i) for i in range(6)] == [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]
    assert [math.exp(node.score) for node in tree.nodes] == pytest.approx(
        [0.5, 0.3, 0.31, 0.14, 0.27, 0.015]
    )
    assert [tree.path(i) for i in tree.kept] == [[0], [0, 0], [1]]
    assert [node.parent for node in tree.rows()] == [0, 1, 0]
    assert (tree.child(ROOT, 1), tree.child(1, 0), tree.child(0, 0)) == (1, None, 2)
    # the tie among the children of 1 decides nothing: none of them is kept
    assert tree.margin == pytest.approx(math.log(0.3 / 0.27))


def test_of_equal_nodes_the_earlier_is_better():
    tree = tree_of(dict.fromkeys((None, 0, 1, 2, 3), (0.25,) * 4), (8, 3, 3))
    assert [node.parent for node in tree.nodes] == [
        parent for parent in (ROOT, 0, 1, 2, 3, 4, 5) for _ in range(3)
    ]
    assert [node.token for node in tree.nodes] == [0, 1, 2] * 7
    assert tree.kept == [0, 1, 2, 3, 4, 5, 6]
    assert tree.margin == 0


def test_a_parent_comes_before_a_child_that_is_certain():
    tree = tree_of(dict.fromkeys((None, 0, 1), (1.0, 1e-300)), (4, 3, 2))
    assert [tree.path(i) for i in tree.kept] == [[0], [0, 0], [0, 0, 0]]
    assert [node.parent for node in tree.rows()] == [0, 1, 2]


def tree_of(probs, shape):
    """The tree of a draft whose probabilities depend on the last token (None at the root)."""

    def row(token):
        return DraftRow(torch.tensor(probs[token], dtype=torch.float64).log(), None, None)

    ids_W = torch.arange(len(probs[None]))
    return draft_tree(
        row(None), lambda _, token: row(token), lambda logits_W, _: logits_W, ids_W, Shape(*shape)
    )
