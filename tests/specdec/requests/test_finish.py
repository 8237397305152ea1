"""Where a request ends: the earliest position; there a stop string, then a token, then length."""

import itertools

import pytest

from specdec.requests.request import Finish, FinishRules, find_finish

EOS, STOP = ord("."), ord("!")


def finish(rules, pieces, num_before=0, tokens=None):
    """The end of a text of one piece per token, by default the last character of the piece."""
    text = "".join(pieces)
    ends = list(itertools.accumulate(map(len, pieces)))
    return find_finish(
        rules,
        tokens or [ord(piece[-1]) if piece else 0 for piece in pieces],
        text,
        ends,
        num_before,
    )


def rules(max_tokens=100, **more):
    return FinishRules(max_tokens=max_tokens, eos_token_ids={EOS}, stop_token_ids={STOP}, **more)


def stopped(num_tokens, num_chars, stop):
    return Finish(
        reason="stop",
        num_tokens=num_tokens,
        num_text_tokens=num_tokens,
        num_chars=num_chars,
        stop_reason=stop,
    )


LENGTH_3 = Finish(reason="length", num_tokens=3, num_text_tokens=3)
EOS_3 = Finish(reason="stop", num_tokens=3, num_text_tokens=2)
STOP_3 = Finish(reason="stop", num_tokens=3, num_text_tokens=2, stop_reason=STOP)


@pytest.mark.parametrize(
    "given, pieces, expected",
    [
        (rules(), "abc", None),
        (rules(3), "abc", LENGTH_3),
        (rules(3), "abcdef", LENGTH_3),
        (rules(), "ab.", EOS_3),
        (rules(), "ab!", STOP_3),
        (rules(3), "abc.", LENGTH_3),  # EOS after the limit
        (rules(3), "abcx", LENGTH_3),
        (rules(3), "ab.", EOS_3),  # EOS at the limit
        (rules(3), "ab!", STOP_3),
        (rules(), "ab!.", STOP_3),
        (rules(), "ab.!", EOS_3),
        (rules(3, stop_strings=["c"]), "abc", stopped(3, 2, "c")),
        (rules(stop_strings=["."]), "ab.", stopped(3, 2, ".")),
        (rules(stop_strings=["d"]), "ab.d", EOS_3),
        (
            rules(2, stop_strings=["c"]),
            "abc",
            Finish(reason="length", num_tokens=2, num_text_tokens=2),
        ),
    ],
)
def test_the_earliest_position_wins_and_there_stop_string_then_token_then_length(
    given, pieces, expected
):
    assert finish(given, pieces) == expected


@pytest.mark.parametrize(
    "stops, pieces, expected",
    [
        (["bcd"], ["ab", "c", "de"], stopped(3, 1, "bcd")),  # over three tokens
        (["bc"], ["abcd"], stopped(1, 1, "bc")),  # inside one token: the rest of it goes
        # the earliest start wins, not the first of the list
        (["c", "bcd"], ["abcde"], stopped(1, 1, "bcd")),
        (["b", "bcd"], ["abcde"], stopped(1, 1, "bcd")),  # from one start the longest
        (["bcd", "c"], ["ab", "c", "d"], stopped(2, 2, "c")),  # the one that is complete first
        (["aab"], ["a", "a", "a", "b"], stopped(4, 1, "aab")),  # overlapping attempts
        (["ab"], ["", "", "ab"], stopped(3, 0, "ab")),  # tokens that complete no text
        (["abab"], ["ab", "", "ab"], stopped(3, 0, "abab")),
        (["x"], ["a", "b"], None),
    ],
)
def test_a_stop_string_is_found_wherever_tokens_part_it(stops, pieces, expected):
    assert finish(rules(stop_strings=stops), pieces) == expected


def test_a_stop_string_is_cut_off_or_kept_and_a_stop_token_likewise():
    kept = {"include_stop_str_in_output": True}
    assert finish(rules(stop_strings=["bc"], **kept), ["ab", "cd"]) == stopped(2, 3, "bc")
    assert finish(rules(**kept), "ab!").num_text_tokens == 3
    assert finish(rules(**kept), "ab.").num_text_tokens == 3


@pytest.mark.parametrize(
    "given, pieces, expected",
    [
        (rules(min_tokens=3), "a.c", None),
        (rules(min_tokens=2), "ab.", EOS_3),
        (rules(min_tokens=2), "!.!", STOP_3),
        (rules(min_tokens=3, stop_strings=["b"]), "abcd", None),
        # completed after the minimum
        (rules(min_tokens=2, stop_strings=["bc"]), "abc", stopped(3, 1, "bc")),
        (rules(min_tokens=2, stop_strings=["b"]), "abcb", stopped(4, 3, "b")),
        (rules(3, min_tokens=3), "...", LENGTH_3),
    ],
)
def test_nothing_but_the_length_ends_a_text_at_min_tokens(given, pieces, expected):
    assert finish(given, pieces) == expected


def test_tokens_before_the_step_were_looked_at_already():
    assert finish(rules(), "a.b", num_before=2) is None
    assert finish(rules(stop_strings=["b"]), "abc", num_before=2) is None
    assert finish(rules(stop_strings=["bc"]), "abc", num_before=2) == stopped(3, 1, "bc")


def test_an_ignored_eos_is_a_token_like_others():
    assert finish(FinishRules(max_tokens=9), "a.b.") is None


@pytest.mark.parametrize("pieces", ["ab.cd", "abcde", ["ab", "", "b.", "c!"]])
@pytest.mark.parametrize(
    "given",
    [
        rules(),
        rules(2),
        rules(4, stop_strings=["bc", "d"]),
        rules(min_tokens=2, stop_strings=["bb"]),
    ],
)
def test_steps_of_any_size_end_at_the_same_place(given, pieces):
    whole = finish(given, pieces)
    for sizes in itertools.product(range(1, 4), repeat=5):
        starts = [0, *itertools.accumulate(sizes)]
        steps = ((a, min(b, len(pieces))) for a, b in itertools.pairwise(starts) if a < len(pieces))
        found = (finish(given, pieces[:b], num_before=a) for a, b in steps)
        assert next((end for end in found if end is not None), None) == whole
