"""What was found, in lines and in JSON, and how far the rule is from it."""

import json

import pytest

from scripts.tune_products import rule_over_tuned
from scripts.tuned_models import random_products
from specdec.kernels.tile_shapes import KINDS, ROW_CLASSES, Product, Shape
from specdec.tune.search import HEAD, Best, Measured

INFINITE = float("inf")

SHAPE = Shape(64, 16, 256, 3, 4)


def measured(rule_us: float, cublas_us: float = 20.0) -> Measured:
    rows = {rows: Best(SHAPE, 10.0, rule_us, cublas_us) for rows in ROW_CLASSES}
    times = {(16, 2, SHAPE): 10.0, (16, 2, SHAPE._replace(num_stages=4)): float("inf")}
    return Measured(product=Product("split", 64, 64), parts=2, rows=rows, times=times)


def test_the_table_has_a_line_for_every_row_class():
    lines = measured(11.0).table().splitlines()
    assert len(lines) == len(ROW_CLASSES)
    assert lines[0].split() == ["split", "64x64", "2", "16", "11.0", "10.0", "20.0"]
    assert len(lines[0]) == len(HEAD)


def test_json_has_every_time_that_was_measured():
    found = json.loads(json.dumps(measured(11.0).as_json()))
    assert found["product"] == "split,64,64,bfloat16"
    assert found["rows"]["512"] == {
        "shape": list(SHAPE),
        "us": 10.0,
        "rule_us": 11.0,
        "cublas_us": 20.0,
    }
    assert found["times"] == [[16, 2, list(SHAPE), 10.0]]


def test_the_rule_is_compared_by_row_class_and_overall():
    ratios = rule_over_tuned([measured(11.0), measured(40.0)])
    assert ratios["16"] == pytest.approx(4.4**0.5)
    assert ratios["overall"] == pytest.approx(4.4**0.5)
    assert ratios["worst"] == 4.0


def test_json_has_null_for_what_did_not_run():
    found = measured(INFINITE, INFINITE)
    rows = json.loads(json.dumps(found.as_json(), allow_nan=False))["rows"]
    assert rows["16"] == {"shape": list(SHAPE), "us": 10.0, "rule_us": None, "cublas_us": None}
    assert set(rule_over_tuned([measured(11.0), found]).values()) == {None}


def test_random_products_are_the_same_for_a_seed_and_of_every_kind():
    found = random_products(5)
    assert found == random_products(5) != random_products(5, seed=1)
    assert {product.kind for product in found} == set(KINDS)
    assert all(product.N % 64 == 0 and product.K % 128 == 0 for product in found)
