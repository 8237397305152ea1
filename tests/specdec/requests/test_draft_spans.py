"""Spans of drafts as a text grows: each comes once, with the text of its own tokens."""

from specdec.requests.draft_spans import DraftSpans
from specdec.requests.output import CompletionOutput
from specdec.requests.stats import RoundRecord

ROUNDS = [RoundRecord((1, 2, 9), 2, 3), RoundRecord((4, 5, 6), 3, 7)]


class Letters:
    """A tokenizer whose token 0 is "a", 1 is "b" and so on."""

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + token) for token in token_ids)


def shown(rounds):
    """Texts with their kinds."""
    return [(span.text, span.kind) for each in rounds for span in each.spans]


def test_a_round_comes_once_its_text_is_certain():
    spans = DraftSpans(Letters())
    # a stop string may begin with "d": the text is held back before it
    first = spans.new(CompletionOutput(0, "abc", [0, 1, 2, 3]), ROUNDS[:1], False)
    assert shown(first) == [("a", "target")]
    second = spans.new(CompletionOutput(0, "abcdefgh", list(range(8))), ROUNDS, False)
    assert shown(second) == [
        *(("bc", "accepted"), ("j", "rejected"), ("d", "recovered")),
        *(("efg", "accepted"), ("h", "bonus")),
    ]
    assert [(each.num_drafted, each.num_accepted) for each in second] == [(3, 2), (3, 3)]
    assert spans.new(CompletionOutput(0, "abcdefgh", list(range(8))), ROUNDS, True) == []


def test_the_text_ends_before_a_stop_string_and_the_tokens_after_it():
    spans = DraftSpans(Letters())
    assert spans.new(CompletionOutput(0, "", [0]), [], False) == []
    rounds = spans.new(CompletionOutput(0, "ab", [0, 1, 2, 3]), ROUNDS, True)
    found = [(span.text, span.kind, list(span.token_ids)) for each in rounds for span in each.spans]
    assert found == [
        *(("a", "target", [0]), ("b", "accepted", [1, 2]), ("j", "rejected", [9])),
        ("", "recovered", [3]),
    ]


def test_drafts_after_the_last_token_are_not_shown():
    rounds = DraftSpans(Letters()).new(CompletionOutput(0, "abc", [0, 1, 2]), ROUNDS, True)
    assert shown(rounds)[:2] == [("a", "target"), ("bc", "accepted")]
    assert {kind for _, kind in shown(rounds)} == {"target", "accepted"}


def test_what_was_beside_a_path_comes_before_the_token_that_was_taken():
    # b and c follow the root, d and e follow b, f follows d
    tree = RoundRecord((1, 2, 3, 4, 5), 2, 6, (0, 0, 1, 1, 3))
    [_, found] = DraftSpans(Letters()).new(CompletionOutput(0, "abdg", [0, 1, 3, 6]), [tree], True)
    assert shown([found]) == [
        *(("c", "rejected"), ("b", "accepted"), ("e", "rejected"), ("d", "accepted")),
        *(("f", "rejected"), ("g", "recovered")),
    ]
    assert (found.num_drafted, found.num_accepted) == (5, 2)


def test_a_whole_path_ends_in_a_bonus_and_a_tree_beside_it_is_shown_by_leaves():
    tree = RoundRecord((1, 2, 3, 4, 5), 1, 6, (0, 0, 2, 2, 4))
    spans = DraftSpans(Letters())
    [_, found] = spans.new(CompletionOutput(0, "abg", [0, 1, 6]), [tree], True)
    assert shown([found]) == [
        *(("cd", "rejected"), ("cef", "rejected"), ("b", "accepted"), ("g", "bonus"))
    ]
    [last] = spans.new(CompletionOutput(0, "abgb", [0, 1, 6, 1]), [tree, tree], True)
    assert [kind for _, kind in shown([last])] == ["rejected", "rejected", "accepted"]


def test_an_incomplete_character_at_the_end_is_part_of_the_text():
    text = "a\N{REPLACEMENT CHARACTER}"
    rounds = DraftSpans(Letters()).new(CompletionOutput(0, text, [0]), [], True)
    assert shown(rounds) == [("a", "target"), ("\N{REPLACEMENT CHARACTER}", "target")]
