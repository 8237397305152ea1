"""A request takes the tokens of its steps and is cut at its end: ids, text and counts alike."""

import pytest

from specdec.requests.params import SamplingParams
from specdec.requests.request import FinishRules, Request, whole_output
from specdec.requests.stats import RequestStats, RoundRecord
from specdec.requests.tokenizer import Detokenizer

EOS = 46  # "."


class Characters:
    """A tokenizer whose tokens are code points."""

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(map(chr, token_ids))


def request(**rules):
    return Request(
        request_id="7",
        prompt="ab",
        prompt_token_ids=[97, 98],
        params=SamplingParams(temperature=0.0),
        rules=FinishRules(**{"max_tokens": 100, "eos_token_ids": {EOS}} | rules),
        detokenizer=Detokenizer(Characters()),
        stats=RequestStats(num_prompt_tokens=2, arrival_time=1.0),
    )


def after(made, *steps):
    for now, step in enumerate(steps, start=2):
        made.append([ord(character) for character in step], float(now))
    return whole_output(made)


def test_a_running_request_shows_what_it_has():
    made = request()
    output = after(made, "x", "yz")
    [completion] = output.outputs
    assert (completion.text, completion.token_ids, completion.finish_reason) == (
        "xyz",
        [120, 121, 122],
        None,
    )
    assert (output.finished, output.request_id, output.prompt, output.prompt_token_ids) == (
        False,
        "7",
        "ab",
        [97, 98],
    )
    assert made.num_tokens == 5


@pytest.mark.parametrize(
    "rules, steps, shown",
    [
        (
            {"stop_strings": ["yzq"]},
            ["x", "y", "z", "y", "y", "a"],
            ["x", "x", "x", "xyz", "xyzy", "xyzyya"],
        ),
        ({"stop_strings": ["zz", "yzzy"]}, ["xy", "z", "a"], ["x", "x", "xyza"]),
        ({"stop_strings": ["yz"], "min_tokens": 3}, ["xyz", "a"], ["xyz", "xyza"]),
        ({"stop_strings": ["yz"], "include_stop_str_in_output": True}, ["xy"], ["xy"]),
        ({}, ["xy"], ["xy"]),
    ],
)
def test_what_could_begin_a_stop_string_is_held_back(rules, steps, shown):
    made = request(**rules)
    assert [after(made, step).outputs[0].text for step in steps] == shown


def test_text_of_a_running_request_is_never_taken_back():
    made = request(stop_strings=["abab!", "ba?"])
    seen = [""]
    for character in "aababababcbaababab!":
        seen.append(after(made, character).outputs[0].text)
        assert seen[-1].startswith(seen[-2])
    assert (seen[-1], made.finish.stop_reason) == ("aababababcbaab", "abab!")


@pytest.mark.parametrize(
    "rules, steps, text, ids, reason, stop_reason",
    [
        ({}, ["x", "y.zz"], "xy", "xy.", "stop", None),
        ({"stop_token_ids": {122}}, ["x", "yzq"], "xy", "xyz", "stop", 122),
        ({"max_tokens": 3}, ["x", "yzq"], "xyz", "xyz", "length", None),
        ({"max_tokens": 2}, ["x", "y.q"], "xy", "xy", "length", None),
        ({"stop_strings": ["yz"]}, ["x", "yzq"], "x", "xyz", "stop", "yz"),
        ({"stop_strings": ["xyz"]}, ["x", "y", "zq"], "", "xyz", "stop", "xyz"),
        (
            {"stop_strings": ["yz"], "include_stop_str_in_output": True},
            ["x", "yzq"],
            "xyz",
            "xyz",
            "stop",
            "yz",
        ),
        ({"include_stop_str_in_output": True}, ["x", "y.zz"], "xy.", "xy.", "stop", None),
        ({}, ["."], "", ".", "stop", None),
    ],
)
def test_nothing_after_the_end_leaks(rules, steps, text, ids, reason, stop_reason):
    made = request(**rules)
    output = after(made, *steps)
    [completion] = output.outputs
    assert (completion.text, "".join(map(chr, completion.token_ids))) == (text, ids)
    assert (completion.finish_reason, completion.stop_reason, output.finished) == (
        reason,
        stop_reason,
        True,
    )
    assert (made.num_tokens, output.stats.num_generated_tokens) == (2 + len(ids), len(ids))


def test_an_output_is_a_snapshot():
    made = request()
    first = after(made, "x").outputs[0].token_ids
    made.append([121], 3.0)
    assert first == [120]


def test_times_are_those_of_the_first_and_the_last_step():
    stats = after(request(), "x", "yz", "uvw").stats
    assert (stats.time_to_first_token, stats.decode_time, stats.time_per_token) == (
        1.0,
        2.0,
        2.0 / 5,
    )


def test_rounds_count_accepted_tokens_before_they_are_cut():
    made = request(max_tokens=3)
    made.append([120], 2.0)
    made.stats.add_round(RoundRecord((121, 122, 123), 3, 124))
    made.append([121, 122, 123, 124], 3.0)
    assert (made.stats.num_accepted, made.stats.num_drafted, made.stats.num_generated_tokens) == (
        [3],
        [3],
        3,
    )
