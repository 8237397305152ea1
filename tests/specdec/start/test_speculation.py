"""How many drafts an engine makes, and whether their rows are shared out."""

import logging
from dataclasses import replace

import pytest

from specdec import SpeculativeConfig
from specdec.config import EngineConfig
from specdec.sizes import TreeShape
from specdec.speculative_config import METHODS
from specdec.start.runners import check_method, refuse_pieces
from specdec.start.speculation import (
    AUTO_TREE,
    Drafting,
    drafting_of,
    of_checkpoint,
    of_draft,
)
from tests.weights.blocks import DFLASH2, block_config
from tests.weights.tiny import eagle3_config, tiny_target


def drafting(has_graphs=True, **values):
    return drafting_of(SpeculativeConfig("demo", **values), has_graphs)


def test_auto_shares_rows_out_where_costs_are_measured():
    chains = Drafting(8, is_adaptive=True, confidence_threshold=None)
    assert drafting(num_speculative_tokens="auto", top_k=1) == chains
    assert drafting() == drafting(num_speculative_tokens="auto") == replace(chains, tree=AUTO_TREE)
    assert drafting(num_speculative_tokens=5) == replace(chains, num_tokens=5)
    assert drafting_of(None, has_graphs=True) == Drafting(0)


def test_a_number_of_drafts_is_that_number_for_every_request():
    assert drafting(num_speculative_tokens=5, adaptive=False) == Drafting(5)
    assert drafting(num_speculative_tokens="auto", adaptive=False) == Drafting(3)
    assert drafting(num_speculative_tokens=0, adaptive=True) == Drafting(0)


def test_a_draft_of_few_tokens_has_no_trees_and_the_log_says_so(caplog):
    both = drafting()
    assert of_draft(both, 4) == both
    with caplog.at_level(logging.INFO, "specdec"):
        assert of_draft(both, 3) == replace(both, tree=None)
    assert "no draft trees of top_k=4: the draft knows 3 tokens" in caplog.text
    fixed = drafting(num_speculative_tokens=5, top_k=4)
    assert of_draft(fixed, 3) == fixed  # which is refused elsewhere


@pytest.mark.parametrize(
    "values, number, reason",
    [
        ({"num_speculative_tokens": "auto", "has_graphs": False}, 3, "rounds are measured"),
        (
            {"num_speculative_tokens": "auto", "acceptance": "block"},
            3,
            "acceptance='block': adaptive",
        ),
        (
            {"num_speculative_tokens": 6, "acceptance": "rejection"},
            6,
            "acceptance='rejection': adaptive",
        ),
    ],
)
def test_where_they_cannot_vary_the_log_says_why(caplog, values, number, reason):
    with caplog.at_level(logging.INFO, "specdec"):
        assert drafting(**values) == Drafting(number)
    assert f"the number of drafts does not adapt: {reason}" in caplog.text


BLOCK = block_config(tiny_target())
PEAGLE = eagle3_config(tiny_target(), num_layers=2, mask_token_id=90)


def checked(draft=BLOCK, **values):
    speculation = SpeculativeConfig("some/draft", **values)
    return of_checkpoint(drafting_of(speculation, has_graphs=True), speculation, draft)


def test_a_block_draft_proposes_as_many_tokens_as_pay_or_a_fixed_number(caplog):
    fixed = {"adaptive": False}
    assert checked(**fixed) == Drafting(5)  # of blocks of 6 rows, whose first one proposes nothing
    assert checked(replace(BLOCK, anchor_proposes=True), **fixed) == Drafting(6)
    assert checked(replace(BLOCK, block_size=16), **fixed) == Drafting(8)
    assert checked(acceptance="rejection") == Drafting(5)
    both = Drafting(5, is_adaptive=True, tree=AUTO_TREE.within(5))
    assert checked() == checked(adaptive=True) == both
    with caplog.at_level(logging.INFO, "specdec"):
        assert checked(num_speculative_tokens=3, **fixed) == Drafting(3)
        assert checked(num_speculative_tokens=2) == Drafting(2, is_adaptive=True)
        checked()
    assert "a dflash draft proposes 3 tokens for every request, in one pass" in caplog.text
    assert "a dflash draft proposes up to 2 tokens, as it pays, in one pass" in caplog.text
    assert "a dflash draft proposes up to 5 tokens or a tree, as it pays, in one" in caplog.text
    assert AUTO_TREE.within(5).smaller == ((2, 5, 15), (5, 5, 9), (7, 5, 7))
    assert (
        checked(top_k=1) == checked(replace(BLOCK, draft_vocab_size=3)) == replace(both, tree=None)
    )
    assert checked(replace(BLOCK, block_size=2)) == Drafting(1, is_adaptive=True)
    tree = TreeShape(num_levels=4, top_k=3, num_nodes=9)
    of_tree = {"num_speculative_tokens": 4, "top_k": 3, "num_draft_tokens": 9}
    assert checked(**of_tree) == Drafting(4, tree=tree)
    assert [BLOCK.block_rows(K) for K in (0, 1, 5)] == [0, 2, 6]
    assert replace(BLOCK, anchor_proposes=True).block_rows(5) == 5


@pytest.mark.parametrize(
    "values, words",
    [
        ({"num_speculative_tokens": 6}, "=6: .* blocks of 6 rows proposes at most 5$"),
        ({"num_speculative_tokens": 6, "top_k": 3}, "=6: .* blocks of 6 rows proposes at most 5$"),
        ({"draft_confidence_threshold": 0.2}, "^draft_confidence_threshold=0.2: .* spare nothing"),
    ],
)
def test_what_a_block_draft_cannot_do_is_refused(values, words):
    with pytest.raises(ValueError, match=words):
        checked(**values)


def test_a_selector_chooses_among_blocks_as_a_chain():
    dflash2 = replace(BLOCK, **DFLASH2)
    assert checked(dflash2) == checked(dflash2, adaptive=True) == Drafting(5, is_adaptive=True)
    assert checked(dflash2, adaptive=False) == Drafting(5)
    with pytest.raises(ValueError, match=r"^top_k=3: a dflash2 draft proposes chains alone"):
        checked(dflash2, num_speculative_tokens=4, top_k=3)


def test_a_p_eagle_draft_proposes_as_many_tokens_as_pay_or_a_fixed_number():
    assert [PEAGLE.block_rows(K) for K in (0, 1, 2, 5)] == [0, 0, 1, 4]
    assert eagle3_config(tiny_target()).block_rows(5) == 0
    assert checked(PEAGLE) == checked(PEAGLE, adaptive=True) == Drafting(8, is_adaptive=True)
    assert checked(replace(PEAGLE, trained_drafts=5), adaptive=False) == Drafting(5)
    assert checked(PEAGLE, num_speculative_tokens=12) == Drafting(12, is_adaptive=True)
    assert checked(PEAGLE, acceptance="rejection") == Drafting(8)
    for values, words in (
        ({"num_speculative_tokens": 4, "top_k": 3}, "^top_k=3: a peagle draft .* chains alone"),
        ({"draft_confidence_threshold": 0.2}, "^draft_confidence_threshold=0.2: a peagle draft"),
    ):
        with pytest.raises(ValueError, match=words):
            checked(PEAGLE, **values)
    refuse_pieces(EngineConfig(cuda_graph_modes={"draft_prefill": "PIECEWISE"}), PEAGLE)


def test_graphs_in_pieces_are_refused_for_a_draft_that_has_none():
    pieces = EngineConfig(cuda_graph_modes={"draft_prefill": "PIECEWISE"})
    with pytest.raises(
        ValueError, match=r"^cuda_graph_modes.*'PIECEWISE': a dflash draft .* whole"
    ):
        refuse_pieces(pieces, BLOCK)
    for mode in ("NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        refuse_pieces(EngineConfig(cuda_graph_modes={"draft_prefill": mode}), BLOCK)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_requires_its_kind_of_draft(method):
    kinds = {
        "dflash": BLOCK,
        "dspark": replace(BLOCK, markov="vanilla", markov_rank=4),
        "dflash2": replace(BLOCK, **DFLASH2),
    }
    kinds |= {"peagle": PEAGLE, "eagle3": eagle3_config(tiny_target())}
    for kind, draft in kinds.items():
        speculation = SpeculativeConfig("some/draft", method=method)
        if method in ("auto", kind):
            check_method(speculation, draft)
            continue
        with pytest.raises(ValueError, match=f"is an? {kind} draft .* or method='{kind}'"):
            check_method(speculation, draft)


def test_a_fixed_number_needs_no_words(caplog):
    with caplog.at_level(logging.INFO, "specdec"):
        drafting(has_graphs=False, num_speculative_tokens=5, adaptive=False)
    assert caplog.text == ""
