"""Options of draft trees: bounds and what does not go together, by name; the shape they ask for."""

import math

import pytest

from specdec import SpeculativeConfig
from specdec.config import EngineConfig
from specdec.sizes import EngineSizes, TreeShape
from specdec.start.sizing import largest_sizes
from specdec.start.speculation import Drafting, drafting_of
from tests.weights.tiny import eagle3_config, tiny_target


def config(**values):
    return SpeculativeConfig("demo", **{"num_speculative_tokens": 3, "adaptive": False} | values)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"draft_confidence_threshold": 1}, "draft_confidence_threshold=1: give a probability"),
        (
            {"draft_confidence_threshold": -0.1},
            "=-0.1: give a .* from 0 to below 1, or",
        ),
        ({"draft_confidence_threshold": math.nan}, "draft_confidence_threshold=nan"),
        ({"draft_confidence_threshold": True}, "draft_confidence_threshold=True"),
        ({"draft_confidence_threshold": "0.1"}, "draft_confidence_threshold='0.1'"),
        (
            {"draft_confidence_threshold": 0.1, "num_speculative_tokens": 1},
            "draft_confidence_threshold=0.1 with num_speculative_tokens=1: a first draft is",
        ),
        (
            {"acceptance": "block", "num_speculative_tokens": 0},
            "acceptance='block' with num_speculative_tokens=0: there are no drafts to accept",
        ),
        (
            {"draft_confidence_threshold": 0.1, "acceptance": "block"},
            "draft_confidence_threshold=0.1 with acceptance='block': drafts stop with 'exact' only",
        ),
        ({"top_k": 0}, "top_k=0: give an integer from 1 to 16"),
        ({"top_k": 17}, "top_k=17"),
        ({"top_k": True}, "top_k=True"),
        ({"top_k": 2, "num_draft_tokens": 64}, "num_draft_tokens=64: give an integer from 0 to 63"),
        ({"top_k": 2, "num_draft_tokens": 0}, "num_draft_tokens=0: of a tree .* 1 to 10 nodes"),
        (
            {"top_k": 3, "num_speculative_tokens": 2, "num_draft_tokens": 13},
            "num_draft_tokens=13: of a tree of num_speculative_tokens=2 levels with top_k=3 1 to",
        ),
        (
            {"top_k": 2, "num_speculative_tokens": "auto"},
            "num_speculative_tokens='auto' with top_k",
        ),
        ({"top_k": 2, "num_speculative_tokens": 0}, "num_speculative_tokens=0 with top_k=2"),
        ({"top_k": 2, "adaptive": True}, "top_k=2 with adaptive=True: .* give adaptive=False"),
        ({"top_k": 2, "acceptance": "rejection"}, "top_k=2 with acceptance='rejection'"),
        ({"top_k": 2, "acceptance": "block"}, "top_k=2 with acceptance='block'"),
        (
            {"num_speculative_tokens": 5, "num_draft_tokens": 7},
            "num_draft_tokens=7 without a top_k above 1: a chain has num_speculative_tokens=5",
        ),
        (
            {"num_speculative_tokens": "auto", "num_draft_tokens": 7},
            "num_draft_tokens=7 without a top_k above 1",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(values, words):
    with pytest.raises(ValueError, match=words):
        config(**values)


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("given, threshold", [(None, 0.0), (0, 0.0), (0.2, 0.2)])
def test_drafts_stop_where_a_threshold_is_given_and_adaptive_ones_where_it_pays(
    top_k, given, threshold
):
    for adaptive in (False, None):
        values = {"top_k": top_k, "draft_confidence_threshold": given, "adaptive": adaptive}
        drafting = drafting_of(config(**values), True)
        is_chosen = drafting.is_adaptive and given is None
        assert drafting.confidence_threshold == (None if is_chosen else threshold)
        assert drafting.is_adaptive == (adaptive is None and top_k == 1)


def test_one_child_a_node_is_the_chain():
    chain = drafting_of(config(num_speculative_tokens=5, top_k=1, num_draft_tokens=5), True)
    assert chain == drafting_of(config(num_speculative_tokens=5), True) == Drafting(5)


def test_a_tree_has_as_many_nodes_as_levels_unless_told_otherwise():
    plain = drafting_of(config(num_speculative_tokens=5, top_k=4), has_graphs=True)
    assert plain.tree == TreeShape(num_levels=5, top_k=4, num_nodes=5)
    wide = drafting_of(config(num_speculative_tokens=5, top_k=4, num_draft_tokens=15), True)
    assert wide.tree == TreeShape(num_levels=5, top_k=4, num_nodes=15)
    assert (wide.num_tokens, wide.is_adaptive) == (5, False)


def test_sizes_count_nodes_paths_and_scratch_blocks():
    def sizes(tree, levels, is_adaptive=False, max_num_seqs=10):
        return EngineSizes(
            max_model_len=64,
            max_num_seqs=max_num_seqs,
            is_adaptive=is_adaptive,
            max_num_batched_tokens=8,
            num_kv_blocks=4,
            num_speculative_tokens=levels,
            tree=tree,
        )

    tree = TreeShape(num_levels=6, top_k=4, num_nodes=15)
    assert tree.num_rows == 16
    assert tree.num_candidates == 4 + 5 * 16
    found = sizes(tree, 6)
    assert (found.query_len, found.path_len, found.max_verify_rows) == (16, 7, 160)
    assert (found.num_tree_blocks, found.num_draft_tree_blocks) == (3, 4)
    small = TreeShape(num_levels=6, top_k=4, num_nodes=3)
    assert (sizes(small, 6).query_len, sizes(small, 6).path_len) == (4, 4)
    chain = sizes(None, 6)
    assert (chain.query_len, chain.path_len, chain.num_tree_blocks) == (7, 7, 0)
    both = sizes(tree, 6, is_adaptive=True)
    assert (both.query_len, both.path_len, both.max_verify_rows) == (7, 7, 128)
    assert (both.max_tree_requests, both.num_tree_blocks, both.num_draft_tree_blocks) == (8, 2, 3)
    many, of_chains = (sizes(each, 6, True, 64) for each in (tree, None))
    assert (many.max_verify_rows, many.num_tree_blocks) == (of_chains.max_verify_rows, 2)
    with pytest.raises(ValueError, match=r"num_speculative_tokens=5, .* has 6 nodes"):
        sizes(tree, 5, is_adaptive=True)


def test_trees_run_for_at_most_32_requests_at_a_time():
    target = tiny_target().config

    def most(top_k, **given):
        drafting = drafting_of(config(top_k=top_k), has_graphs=True)
        return largest_sizes(EngineConfig(max_model_len=32, **given), drafting, target, None)

    assert [most(4, **given).max_num_seqs for given in ({}, {"max_num_seqs": 7})] == [32, 7]
    assert most(4).num_kv_blocks * 2 == most(1).num_kv_blocks
    assert most(1, max_num_seqs=33).max_num_seqs == 33
    with pytest.raises(ValueError, match=r"max_num_seqs=33 with top_k=4: .* at most 32 requests"):
        most(4, max_num_seqs=33)


def test_a_draft_must_know_as_many_tokens_as_a_node_has_children():
    target = tiny_target()
    eagle = eagle3_config(target, draft_vocab_size=5)
    options = EngineConfig(max_model_len=32)
    largest_sizes(options, drafting_of(config(top_k=5), True), target.config, eagle)
    with pytest.raises(ValueError, match="6 children of each node, but the draft knows 5 tokens"):
        largest_sizes(options, drafting_of(config(top_k=6), True), target.config, eagle)


@pytest.mark.parametrize(
    "num_nodes, smaller",
    [
        (9, [(3, 5, 3)]),
        (9, [(3, 2, 10)]),
        (3, [(3, 1, 3)]),
        (13, [(3, 2, 4)]),
        (9, [(1, 3, 4)]),
        (9, [(2, 3, 4), (2, 2, 4)]),
        (9, [(2, 2, 4), (3, 3, 4)]),
        (9, [(2, 3, 4), (3, 2, 5)]),
    ],
)
def test_trees_of_more_requests_are_no_larger_and_have_nodes_for_fewer(num_nodes, smaller):
    """Of the fourth, the levels have 12 candidates, and one request verifies 13 nodes."""
    message = f"2 to [432] levels and at most [0-9]+ nodes, and levels that have {num_nodes} cand"
    with pytest.raises(ValueError, match=message):
        TreeShape(num_levels=4, top_k=3, num_nodes=num_nodes, smaller=tuple(smaller))


def test_many_requests_have_smaller_trees():
    shape = TreeShape(num_levels=4, top_k=3, num_nodes=9, smaller=((3, 3, 4), (5, 2, 4)))
    assert [shape.of(n).num_rows for n in (1, 2, 3, 5, 8)] == [10, 10, 5, 5, 5]
    assert [shape.of(n).num_levels for n in (2, 3, 4, 5)] == [4, 3, 3, 2]
    assert [shape.of(n).path_len for n in (2, 4, 5)] == [5, 4, 3]
    assert shape.first_requests == (1, 3, 5)
