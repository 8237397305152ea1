"""On how many GPUs a model has the bits of one, and why not on others."""

from dataclasses import replace

import pytest

from scripts import write_equal_bits
from scripts.tuned_models import KNOWN_MODELS, Sizes, target_of
from specdec.kernels import sum_order
from specdec.parallel.equal_bits import SIZES, draft_fit_of, fits_of
from tests.weights.tiny import eagle3_config, tiny_target
from weights.config import ExpertsConfig

LLAMA_8B = KNOWN_MODELS["llama-3.1-8b"]
EXPERTS = ExpertsConfig(num=12, per_token=2, width=64, renormalise=True)


def judged(sizes: Sizes, experts: ExpertsConfig | None = None) -> list[tuple[str, str]]:
    fits = fits_of(target_of(sizes, experts))
    assert [fit.size for fit in fits] == list(SIZES)
    return [(fit.bits, fit.reason) for fit in fits]


def test_a_model_of_four_splits_has_equal_bits_on_2_and_4_gpus():
    other = ("other", "o_proj has 4 splits")
    assert judged(LLAMA_8B) == [("equal", ""), ("equal", ""), other]


def test_more_splits_are_equal_bits_on_more_gpus(monkeypatch):
    monkeypatch.setattr(sum_order, "SPLITS", (2, 4, 8))
    assert judged(LLAMA_8B) == [("equal", "")] * 3


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"num_heads": 28, "num_kv_heads": 4}, ["equal", "equal", "none: 28 heads"]),
        ({"num_kv_heads": 2}, ["equal", "equal", "other: o_proj has 4 splits"]),
        ({"num_kv_heads": 6}, ["equal", "none: 6 kv heads", "none: 6 kv heads"]),
        (
            {"intermediate_size": 14464},
            ["equal", *["other: down_proj has 2 splits", "other: o_proj has 4 splits"]],
        ),
        (
            {"intermediate_size": 1100},
            ["none: 1,100 columns of down_proj"] * 3,
        ),
        (
            {"intermediate_size": 1120},
            ["other: down_proj has 1 split"] * 2 + ["none: 1,120 columns of down_proj"],
        ),
    ],
)
def test_what_does_not_fit_is_named(changes, expected):
    found = judged(LLAMA_8B._replace(**changes))
    assert [": ".join(filter(None, each)) for each in found] == expected


def test_experts_go_to_gpus_whole_and_have_no_splits():
    sizes = LLAMA_8B._replace(intermediate_size=0)
    assert judged(sizes, EXPERTS) == [("equal", ""), ("equal", ""), ("none", "12 experts")]


def test_every_kind_of_layer_counts():
    target = target_of(LLAMA_8B)
    (layer,) = target.layers
    dense = replace(layer, intermediate_size=1088)
    both = replace(target, layers=(replace(layer, intermediate_size=0, experts=EXPERTS), dense))
    assert [fit.bits for fit in fits_of(both)] == ["other", "other", "none"]


def test_a_draft_is_judged_by_its_own_layer():
    eagle = eagle3_config(tiny_target("llama"))
    large = replace(eagle, layer=target_of(LLAMA_8B).layers[0])
    assert [draft_fit_of(large, size).bits for size in SIZES] == ["equal", "equal", "other"]


def test_the_documented_table_is_what_the_code_says():
    text = write_equal_bits.FILE.read_text()
    assert text == write_equal_bits.generated(), "run python -m scripts.write_equal_bits"
    assert "| llama-3.1-8b | equal | equal | other bits: o_proj has 4 splits |" in text
