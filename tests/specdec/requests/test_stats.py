"""The field's definitions, on rounds made by hand: D rounds, T drafted, A accepted."""

import gc

import pytest

from specdec.requests.stats import RequestStats, RoundRecord, SpeculationStats


def stats(K, *num_accepted):
    made = SpeculationStats()
    for count in num_accepted:
        made.add_round(chain(K, count))
    return made


def chain(K, num_accepted):
    return RoundRecord((7,) * K, num_accepted, 7)


def test_figures_of_five_rounds():
    made = stats(3, 3, 0, 1, 3, 2)
    assert (made.num_rounds, made.num_drafted_tokens, made.num_accepted_tokens) == (5, 15, 9)
    assert made.mean_acceptance_length == 1 + 9 / 5
    assert made.draft_acceptance_rate == 9 / 15
    assert made.num_accepted_per_position == [4, 3, 2]
    assert made.acceptance_rate_per_position == [4 / 5, 3 / 5, 2 / 5]
    assert made.conditional_acceptance_rates == [4 / 5, 3 / 4, 2 / 3]
    assert made.acceptance_histogram == {1: 1, 2: 1, 3: 1, 4: 2}


@pytest.mark.parametrize("counts", [(0,), (3,), (1, 2, 3), (0, 0, 3, 1)])
def test_the_mean_is_one_plus_the_rates_of_all_positions(counts):
    made = stats(3, *counts)
    assert made.mean_acceptance_length == pytest.approx(1 + sum(made.acceptance_rate_per_position))
    lengths = sum(length * rounds for length, rounds in made.acceptance_histogram.items())
    assert made.mean_acceptance_length == pytest.approx(lengths / made.num_rounds)


def test_plain_decoding_has_rounds_of_one_token_and_no_rate():
    made = stats(0, 0, 0, 0)
    assert (made.num_rounds, made.mean_acceptance_length, made.draft_acceptance_rate) == (
        3,
        1.0,
        None,
    )
    assert (made.acceptance_rate_per_position, made.acceptance_histogram) == ([], {1: 3})


def test_no_rounds_have_no_mean():
    made = SpeculationStats()
    assert (made.mean_acceptance_length, made.draft_acceptance_rate) == (None, None)
    assert (made.num_accepted_per_position, made.acceptance_histogram) == ([], {})


def test_a_position_that_is_never_reached_has_no_conditional_rate():
    assert stats(3, 0, 1).conditional_acceptance_rates == [1 / 2, 0.0, None]


def test_a_run_is_the_mean_over_rounds_not_over_requests():
    run = SpeculationStats.merged([stats(3, 3), stats(3, 0, 0, 0), SpeculationStats()])
    assert (run.num_rounds, run.mean_acceptance_length) == (4, 1 + 3 / 4)


def test_requests_may_draft_different_numbers():
    run = SpeculationStats.merged([stats(1, 1), stats(4, 2)])
    assert (run.num_drafted_tokens, run.num_accepted_per_position) == (5, [2, 1, 0, 0])


@pytest.mark.parametrize(
    "rules, name", [(["block"] * 2, "block"), (["exact", "block"], "mixed"), ([], "exact")]
)
def test_a_run_says_which_rule_accepted(rules, name):
    parts = [RequestStats(acceptance=rule) for rule in rules]
    assert SpeculationStats.merged(parts).as_dict()["acceptance"] == name
    if parts:
        assert RequestStats.of_samples(parts).as_dict()["acceptance"] == name


def test_rounds_are_read_as_they_were_counted_and_leave_nothing_to_collect():
    """The collector unties plain tuples of numbers; what it must walk over is the list alone."""
    made = SpeculationStats()
    records = [RoundRecord((7, i), i % 3, 500 + i, (0, 1) if i % 2 else ()) for i in range(300)]
    gc.collect()
    before = len(gc.get_objects())
    for i in range(300):
        made.add_round(RoundRecord((7, i), i % 3, 500 + i, (0, 1) if i % 2 else ()))
    gc.collect()
    gc.collect()  # a tuple of tuples, after these
    assert len(gc.get_objects()) - before < 30
    assert made.rounds == records
    assert made.rounds_after(298) == records[298:]
    assert made.num_rounds == 300
    assert SpeculationStats.merged([made, made]).rounds == 2 * records


def test_what_is_printed_shows_rounds_and_acceptance():
    shown = (
        "num_rounds=5, num_drafted_tokens=15, num_accepted_tokens=9, mean_acceptance_length=2.8, "
        "draft_acceptance_rate=0.6, acceptance='exact'"
    )
    assert repr(stats(3, 3, 0, 1, 3, 2)) == f"SpeculationStats({shown})"
    made = RequestStats(
        num_prompt_tokens=4, num_generated_tokens=4, first_token_time=1.0, last_token_time=3.0
    )
    assert "num_rounds=0, " in repr(made)
    assert "mean_acceptance_length=None, draft_acceptance_rate=None" in repr(made)
    for count in (3, 0, 1):
        made.add_round(chain(3, count))
    assert repr(made).startswith("RequestStats(num_rounds=3, ")
    assert "mean_acceptance_length=2.333, draft_acceptance_rate=0.4444, " in repr(made)
    assert "num_prompt_tokens=4, num_generated_tokens=4, " in repr(made)
    assert "time_per_token=0.6667, tokens_per_second=1.5, " in repr(made)
    fast = RequestStats(num_generated_tokens=24691, first_token_time=1.0, last_token_time=3.0)
    assert "tokens_per_second=12340.0, " in repr(fast)


def test_times_of_a_request():
    made = RequestStats(
        num_generated_tokens=5, arrival_time=10.0, first_token_time=10.5, last_token_time=12.5
    )
    made.add_round(chain(3, 3))
    assert (made.time_to_first_token, made.decode_time, made.time_per_token) == (0.5, 2.0, 0.5)
    assert (made.tokens_per_second, made.round_ms) == (2.0, 2000.0)


def test_samples_together_last_from_the_first_token_of_any_to_the_last_of_any():
    times = [(11.0, 14.0), (10.5, 12.0), (None, None)]
    parts = [
        RequestStats(
            num_prompt_tokens=7, arrival_time=10.0, first_token_time=first, last_token_time=last
        )
        for first, last in times
    ]
    for part, count in zip(parts, (4, 2, 0), strict=True):
        part.num_generated_tokens = part.num_cached_tokens = part.num_preemptions = count
    made = RequestStats.of_samples(parts)
    assert (made.time_to_first_token, made.decode_time, made.num_prompt_tokens) == (0.5, 3.5, 7)
    assert (made.num_generated_tokens, made.num_preemptions) == (6, 6)
    assert made.num_cached_tokens == 4  # of the prompt, when the first came


def test_a_round_of_one_of_several_samples_takes_as_long_as_its_own():
    parts = [RequestStats(first_token_time=1.0, last_token_time=end) for end in (3.0, 5.0)]
    for part, count in zip(parts, (4, 8), strict=True):
        for _ in range(count):
            part.add_round(chain(3, 3))
    assert [part.round_ms for part in parts] == [500.0, 500.0]
    assert RequestStats.of_samples(parts).round_ms == 500.0


def test_times_that_were_not_measured_are_none():
    names = (
        "time_to_first_token",
        "decode_time",
        "time_per_token",
        "tokens_per_second",
        "round_ms",
    )
    assert {getattr(RequestStats(), name) for name in names} == {None}
    one_token = RequestStats(num_generated_tokens=1, first_token_time=1.0, last_token_time=1.0)
    assert (one_token.time_per_token, one_token.round_ms) == (None, None)


def test_the_dict_for_json_holds_every_figure():
    figures = RequestStats().as_dict()
    assert {"mean_acceptance_length", "conditional_acceptance_rates", "round_ms"} <= figures.keys()


@pytest.mark.parametrize("num_drafted, num_accepted", [(3, 4), (0, 1), (3, -1), (0, -1)])
def test_a_round_accepts_what_was_drafted_and_no_more(num_drafted, num_accepted):
    made = stats(3, 3)
    message = f"num_drafted={num_drafted} with num_accepted={num_accepted}"
    with pytest.raises(ValueError, match=message):
        made.add_round(chain(num_drafted, num_accepted))
    assert (made.num_drafted, made.num_accepted) == ([3], [3])


def test_a_round_of_a_tree_accepts_no_more_than_its_levels():
    made = SpeculationStats()
    with pytest.raises(ValueError, match="num_drafted=2 with num_accepted=3"):
        made.add_round(RoundRecord((7, 8, 9), 3, 7, parents=(0, 1, 1)))
    made.add_round(RoundRecord((7, 8, 9), 2, 7, parents=(0, 1, 1)))
    assert (made.num_drafted, made.num_accepted, made.num_levels) == ([3], [2], [2])
