"""The line of figures: why a text ended, at most 60 columns, and a word about a useless draft."""

import pytest

from specdec.cli.figures import COLUMNS, figures, lines, warning
from specdec.requests.output import CompletionOutput, RequestOutput
from specdec.requests.stats import RequestStats, RoundRecord


def output_of(num_rounds: int, num_accepted: int, K: int = 3, **ending: object) -> RequestOutput:
    """Every round accepts as many drafts."""
    stats = RequestStats(num_generated_tokens=9)
    for _ in range(num_rounds):
        stats.add_round(RoundRecord((7,) * K, num_accepted, 7))
    return RequestOutput("0", "", [0], [CompletionOutput(0, "", [], stats=stats, **ending)], True)


@pytest.mark.parametrize(
    "ending, words",
    [
        ({"finish_reason": "length"}, "| length |"),
        ({"finish_reason": "stop"}, "| stop |"),
        ({"finish_reason": "stop", "stop_reason": "\n\n"}, r"| stop: '\n\n' |"),
        ({"finish_reason": "stop", "stop_reason": 7}, "| stop: 7 |"),
    ],
)
def test_the_reason_of_the_end_follows_the_tokens(ending, words):
    assert figures(output_of(4, 1, **ending)).startswith(f"9 tokens in 4 rounds {words}")


def test_samples_are_counted_by_how_they_ended():
    output = output_of(4, 1, finish_reason="length")
    output.outputs += [CompletionOutput(i, "", [], "stop") for i in (1, 2)]
    assert "| length, stop (2)\n" in figures(output)


def test_an_interrupted_text_says_so():
    output = output_of(4, 1, finish_reason="error", stop_reason="a step was interrupted")
    output.finished = False
    assert figures(output).startswith("9 tokens in 4 rounds | interrupted |")


@pytest.mark.parametrize("K", [0, 1, 3, 5, 32])
@pytest.mark.parametrize("stop", ["x", "\n" * 99, "a long sentence that ends the text " * 9])
def test_no_line_is_longer_than_60_columns(K, stop):
    text = figures(output_of(4, K, K, finish_reason="stop", stop_reason=stop))

    assert max(map(len, text.split("\n"))) <= COLUMNS
    assert text.count("1.00") == K


def test_lines_break_at_a_bar():
    assert lines(["a" * 30, "b" * 27, "c"]) == ["a" * 30 + " | " + "b" * 27, "c"]


@pytest.mark.parametrize(
    "num_rounds, num_accepted, draft, is_warned",
    [
        (16, 0, "d", True),
        (15, 0, "d", False),
        (16, 1, "d", False),
        (16, 0, None, False),
    ],
)
def test_a_draft_that_is_hardly_ever_accepted_is_named(num_rounds, num_accepted, draft, is_warned):
    found = warning(output_of(num_rounds, num_accepted), "my target", draft)
    assert (found is not None and found.endswith(":\nspecdec verify 'my target' d")) == is_warned
