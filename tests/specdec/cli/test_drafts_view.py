"""The view of drafts: without the rejected spans it is the text; each token has its kind."""

import re
from io import StringIO

import pytest
from rich.console import Console

from specdec.cli.drafts_view import DraftsView
from specdec.cli.figures import COLUMNS
from specdec.requests.draft_spans import DraftRound, DraftSpans, Span
from specdec.requests.output import CompletionOutput, RequestOutput
from specdec.requests.stats import RequestStats, RoundRecord


class Letters:
    """A tokenizer whose token 0 is "a", 1 is "b" and so on."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def draft_spans(output, tokenizer):
    """The spans of one output, of which the view shows those with a text."""
    completion, records = output.outputs[0], output.stats.rounds
    rounds = DraftSpans(tokenizer).new(completion, records, is_over=True)
    return [span for each in rounds for span in each.spans if span.text]


def shown(console, *spans, prompt=None):
    """What the view prints of rounds of one span each."""
    view = DraftsView(console, prompt)
    for span in spans:
        view.add([DraftRound(1, 1, [span])])
    view.end()
    return console.file.getvalue()


def output_of(text: str, token_ids: list[int], rounds: list[RoundRecord]) -> RequestOutput:
    stats = RequestStats()
    for record in rounds:
        stats.add_round(record)
    return RequestOutput("0", "", [0], [CompletionOutput(0, text, token_ids, stats=stats)], True)


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
    spans = Span("a", "target"), Span("b\n", "rejected"), Span("c\n", "recovered")
    text = shown(console, *spans, Span("d", "bonus"))

    assert ("\x1b[2;9;31mb\N{RETURN SYMBOL}\x1b[0m" in text) == has_colors
    assert ("\n\na[-b\N{RETURN SYMBOL}-]c\nd\n" in text) != has_colors


@pytest.mark.parametrize("has_colors", [True, False])
def test_the_legend_names_every_kind_in_lines_of_60_columns(has_colors):
    system = "standard" if has_colors else None
    console = Console(
        file=StringIO(), force_terminal=has_colors, color_system=system, soft_wrap=True
    )
    text = re.sub(r"\x1b\[[\d;]*m", "", shown(console, Span("a", "target")))
    legend, _, body = text.partition("\n\n")
    assert body == "a\n"
    assert max(map(len, legend.splitlines())) <= COLUMNS
    kinds = ("accepted", "rejected", "recovered", "bonus") if has_colors else ("{+acc", "[-rej")
    assert all(kind in legend for kind in kinds)


def test_a_text_that_has_not_begun_has_no_legend():
    console = Console(file=StringIO(), color_system=None)
    assert shown(console, Span("", "target")) == "\n"
