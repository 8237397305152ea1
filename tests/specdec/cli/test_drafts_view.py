"""The view of drafts: without the rejected spans it is the text; each token has its kind."""

from io import StringIO

import pytest
from rich.console import Console

from specdec.cli.drafts_view import Span, draft_spans, render_drafts
from specdec.requests.output import CompletionOutput, RequestOutput
from specdec.requests.stats import RequestStats, RoundRecord


class Letters:
    """A tokenizer whose token 0 is "a", 1 is "b" and so on."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def output_of(text: str, token_ids: list[int], rounds: list[RoundRecord]) -> RequestOutput:
    stats = RequestStats()
    for record in rounds:
        stats.add_round(record)
    return RequestOutput("0", "", [0], [CompletionOutput(0, text, token_ids)], True, stats)


def test_a_round_is_accepted_then_rejected_then_recovered():
    rounds = [RoundRecord((1, 2, 9), 2, 3), RoundRecord((4, 5, 6), 3, 7), RoundRecord((), 0, 8)]
    spans = draft_spans(output_of("abcdefghi", list(range(9)), rounds), Letters())

    assert [(span.text, span.kind) for span in spans] == [
        ("a", "target"),
        ("bc", "accepted"),
        ("j", "rejected"),
        ("d", "recovered"),
        ("efg", "accepted"),
        ("h", "bonus"),
        ("i", "target"),
    ]


def test_what_lies_after_the_end_of_the_request_is_not_shown():
    spans = draft_spans(output_of("abc", [0, 1, 2], [RoundRecord((1, 2, 3), 3, 4)]), Letters())

    assert [(span.text, span.kind) for span in spans] == [("a", "target"), ("bc", "accepted")]


def test_the_view_ends_where_a_stop_string_cut_the_text():
    spans = draft_spans(output_of("ab", [0, 1, 2], [RoundRecord((1, 9), 1, 2)]), Letters())

    assert "".join(span.text for span in spans if span.kind != "rejected") == "ab"


@pytest.mark.parametrize("has_colors", [True, False])
def test_colors_or_marks(has_colors):
    stream = StringIO()
    console = Console(
        file=stream, force_terminal=has_colors, color_system="standard" if has_colors else None
    )
    render_drafts(console, [Span("a", "target"), Span("b\n", "rejected"), Span("c", "recovered")])

    shown = stream.getvalue()
    assert ("\x1b[2;9;31mb\N{RETURN SYMBOL}\x1b[0m" in shown) == has_colors
    assert ("a[-b\N{RETURN SYMBOL}-]c" in shown) != has_colors
