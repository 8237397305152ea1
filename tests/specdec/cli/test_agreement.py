"""What `specdec verify` concludes from figures."""

import pytest

from specdec.cli.verify import Agreement, count_equal, judge, read_as
from specdec.requests.stats import SpeculationStats
from tests.weights.formats import FORMATS
from tests.weights.fp8 import save_odd, write_fp8
from tests.weights.published import save
from tests.weights.tiny import draft_tensors, eagle1_config, eagle3_config, tiny_target
from weights import load_eagle, load_target


def agreement(*num_agreeing: int, num_repeated: int | None = None) -> Agreement:
    repeated = num_agreeing[0] if num_repeated is None else num_repeated
    return Agreement(
        num_agreeing=num_agreeing, num_repeated=repeated, acceptance=SpeculationStats()
    )


@pytest.mark.parametrize("first, works", [(24, False), (25, True), (80, True)])
def test_less_than_a_quarter_at_position_1_does_not_work(first, works):
    verdict = judge(agreement(100, first, first))

    assert verdict.works == works
    assert bool(verdict.causes) != works


def test_a_fall_at_position_2_points_at_the_recycled_state():
    verdict = judge(agreement(100, 80, 20))

    assert verdict.works
    assert "falls to 25% at position 2" in verdict.text
    assert "recycled" in verdict.causes[0]


def test_a_target_that_does_not_repeat_itself_fails_whatever_the_draft():
    verdict = judge(agreement(100, 80, 70, num_repeated=99))

    assert not verdict.works
    assert "1 of 100" in verdict.text


def test_rates_are_conditional_and_none_over_nothing():
    assert agreement(10, 5, 0, 0).rates == [0.5, 0.0, None]


@pytest.mark.parametrize(
    "drafts, count", [([], 0), ([1], 1), ([1, 2, 3], 3), ([1, 9, 3], 1), ([9, 2, 3], 0)]
)
def test_count_equal_stops_at_the_first_difference(drafts, count):
    assert count_equal(drafts, [1, 2, 3]) == count


@pytest.fixture
def draft_report(tmp_path):
    """draft_report(format, config): what was read of a draft in this format."""
    target = tiny_target()

    def load(format, config_of):
        config = config_of(target)
        FORMATS[format].write(tmp_path / format, config, draft_tensors(config), target)
        return load_eagle(tmp_path / format, target, progress=False).report

    return load


def test_experts_and_both_readings_of_taps_are_named(tmp_path, draft_report):
    save("qwen3_moe, every second", tmp_path / "moe")
    target = load_target(tmp_path / "moe", progress=False).report
    read = read_as(target, draft_report("specforge", eagle3_config))
    assert read["router"] == (
        "3 of 12 experts a row, each 24 wide, in 3 of 6 layers; "
        "their weights are a softmax over all experts"
    )
    assert read["taps"].startswith("(2, 4, 5), config.json: eagle_config.eagle_aux")
    assert "would be the boundaries [1, 3, 4]" in read["taps"]


def test_forms_of_products_are_named(tmp_path, draft_report):
    save_odd("qwen3_moe", tmp_path / "plain")
    write_fp8(tmp_path / "plain", tmp_path / "fp8", "block")
    target = load_target(tmp_path / "fp8", progress=False).report
    assert read_as(target, draft_report("eagle-1", eagle1_config))["forms"] == (
        "qkv_proj fp8 block, o_proj fp8 block, gate_up_proj fp8 block, down_proj fp8 block, "
        "expert_form fp8 block"
    )


def test_a_dense_target_and_the_last_hidden_state_take_a_line(draft_report):
    assert read_as(tiny_target().report, draft_report("eagle-1", eagle1_config)) == {
        "taps": "EAGLE-1: the target's hidden after its final norm"
    }
