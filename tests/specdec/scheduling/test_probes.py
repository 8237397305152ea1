"""When probes come, what they cost, and when a draft counts as another one."""

import numpy as np
import pytest

from specdec.scheduling.probes import PROBE_EVERY, Probes, Surprise

SIZES = np.array([64, 96, 128, 192, 256])


def levels_of(probes, steady, num_drafting, num_rounds=3 * PROBE_EVERY):
    return [probes.levels(steady, num_drafting) for _ in range(num_rounds)]


def test_a_probe_drafts_one_level_more_once_in_64_rounds():
    probes = Probes(8)
    levels = levels_of(probes, 3, 16)
    assert [i for i, each in enumerate(levels) if each != 3] == [63, 127, 191]
    assert set(levels) == {3, 4}
    assert probes.num_probes == 3


def test_few_requests_probe_in_several_rounds():
    for num_drafting, num_rounds in ((1, 3), (2, 2), (3, 1), (64, 1)):
        for steady, probed in ((0, 2), (1, 2), (4, 5)):
            levels = levels_of(Probes(8), steady, num_drafting, PROBE_EVERY + 10)
            assert levels[62 : 64 + num_rounds] == [steady, *[probed] * num_rounds, steady]
            assert levels.count(probed) == num_rounds


def test_the_deepest_draft_is_not_probed_deeper():
    probes = Probes(2)
    assert set(levels_of(probes, 2, 4)) == {2}
    assert probes.num_probes == 0
    assert set(levels_of(Probes(1), 0, 4)) == {0, 1}


def test_where_nothing_pays_for_long_probes_come_half_as_often():
    probes = Probes(8)
    levels = levels_of(probes, 0, 8, 8 * PROBE_EVERY)
    found = [i + 1 for i, each in enumerate(levels) if each > 0]
    assert found == [64, 128, 192, 256, 384, 512]
    levels_of(probes, 1, 8, 1)  # a draft pays
    levels = levels_of(probes, 0, 8, 2 * PROBE_EVERY)
    assert [i + 2 for i, each in enumerate(levels) if each > 0] == [64, 128]
    levels_of(probes, 0, 8, 3 * PROBE_EVERY)
    probes.again()
    levels = levels_of(probes, 0, 8, PROBE_EVERY + 1)
    assert [i for i, each in enumerate(levels) if each > 0] == [0, 64]


def test_a_probe_can_be_asked_for_at_once():
    probes = Probes(8)
    probes.again()
    assert levels_of(probes, 0, 8, 3) == [2, 0, 0]


@pytest.mark.parametrize(
    "chosen, num_requests, num_drafts, rows",
    [
        (64, 64, 128, 96),  # 16 more are no size: one size more, else nothing would be learnt
        (128, 64, 192, 128),  # drafts have rows already
        (96, 60, 180, 96),
        (192, 128, 256, 192),
        (64, 61, 3, 64),  # a padded shape holds three drafts
        (64, 64, 20, 96),
    ],
)
def test_a_probe_verifies_few_drafts_more(chosen, num_requests, num_drafts, rows):
    assert Probes(8).rows(SIZES, chosen, num_requests, num_drafts) == rows


def test_all_drafts_of_a_single_request_are_probed_and_half_of_those_of_eight():
    assert Probes(8).rows(np.array([1, 2, 3, 4, 6, 9]), 1, 1, 2) == 3
    assert Probes(8).rows(np.array([1, 4, 9]), 1, 1, 2) == 4
    assert Probes(8).rows(np.array([1]), 1, 1, 2) == 1
    assert Probes(8).rows(np.array([1, 4, 9]), 4, 1, 4) == 9
    assert Probes(8).rows(np.array([8, 12, 16, 24, 32]), 8, 8, 16) == 16


def rounds(surprise, predicted, accepted, count, num_drafting=16, is_probe=False):
    changed, num_entries = [], max(256, 2 * num_drafting)
    for each in range(count):
        surprise.add(predicted, accepted(each), num_drafting, num_entries)
        changed.append(surprise.has_changed(is_probe))
    return changed


def test_drafts_that_hold_as_predicted_are_no_surprise():
    rng = np.random.default_rng(0)

    def geometric(_):
        return int(rng.geometric(0.5, 16).sum()) - 16

    changed = rounds(Surprise(), 16.0, geometric, 3000)
    assert sum(changed) <= 3
    assert any(rounds(Surprise(), 16.0, lambda _: 2, 10))
    assert any(rounds(Surprise(), 16.0, lambda _: 40, 10))


def test_a_small_error_of_the_prediction_is_no_other_draft():
    # 5 % of 4,096 requests are many standard deviations
    assert not any(rounds(Surprise(), 4096.0, lambda _: 4300, 50, 4096))
    assert any(rounds(Surprise(), 4096.0, lambda _: 5200, 50, 4096))


def test_a_probe_is_a_surprise_only_if_more_held():
    def one(predicted, accepted, num_drafting):
        return rounds(Surprise(), predicted, lambda _: accepted, 1, num_drafting, True)[0]

    assert one(0.03, 1, 1)
    assert not one(0.03, 0, 1)
    assert not one(1.0, 2, 64)
    assert one(1.0, 8, 64)
    assert not any(rounds(Surprise(), 16.0, lambda _: 0, 30, 16, True))
