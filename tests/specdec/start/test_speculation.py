"""How many drafts an engine makes, and whether their rows are shared out."""

import logging
from dataclasses import replace

import pytest

from specdec import SpeculativeConfig
from specdec.start.speculation import AUTO_TREE, Drafting, drafting_of, of_draft


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
        ({"num_speculative_tokens": "auto", "has_graphs": False}, 3, "on a GPU only"),
        (
            {"num_speculative_tokens": "auto", "acceptance": "block"},
            3,
            "acceptance='block': adaptive drafting needs",
        ),
        (
            {"num_speculative_tokens": 6, "acceptance": "rejection"},
            6,
            "rejection",
        ),
    ],
)
def test_where_they_cannot_vary_the_log_says_why(caplog, values, number, reason):
    with caplog.at_level(logging.INFO, "specdec"):
        assert drafting(**values) == Drafting(number)
    assert f"{number} drafts for every request" in caplog.text
    assert reason in caplog.text


def test_a_fixed_number_needs_no_words(caplog):
    with caplog.at_level(logging.INFO, "specdec"):
        drafting(has_graphs=False, num_speculative_tokens=5, adaptive=False)
    assert caplog.text == ""
