"""When probes come."""

from specdec.scheduling.probes import PROBE_EVERY, Probes


def due(probes, num_rounds, num_drafting=8, pays=True):
    """Numbers of the rounds that are probes, from 1 on."""
    return [i for i in range(1, num_rounds + 1) if probes.is_due(pays, num_drafting)]


def test_a_probe_comes_every_64_rounds():
    probes = Probes()
    assert due(probes, 3 * PROBE_EVERY) == [64, 128, 192]
    assert probes.num_probes == probes.num_begun == 3


def test_few_requests_probe_in_several_rounds():
    for num_drafting, num_rounds in ((1, 4), (2, 2), (3, 1), (64, 1)):
        probes = Probes()
        assert due(probes, PROBE_EVERY + 10, num_drafting) == [*range(64, 64 + num_rounds)]
        assert (probes.num_probes, probes.num_begun) == (num_rounds, 1)


def test_while_nothing_pays_the_wait_is_64_rounds_and_then_128():
    probes = Probes()
    assert due(probes, 8 * PROBE_EVERY, pays=False) == [64, 192, 320, 448]
    probes = Probes()
    due(probes, 4 * PROBE_EVERY, pays=False)
    assert due(probes, 1) == [1], "a draft pays: no long wait is left"
    assert due(probes, 2 * PROBE_EVERY) == [64, 128]


def test_drafts_of_a_probe_are_live_in_the_round_after_it():
    probes = Probes()
    seen = []
    for _ in range(PROBE_EVERY + 1):
        seen.append(probes.is_live)
        probes.is_due(True, 8)
    assert seen == [False] * PROBE_EVERY + [True]
