"""Typed reads of config.json."""

from pathlib import Path

import pytest

from weights import CheckpointError
from weights.errors import Problems
from weights.fields import Fields, read_json_object


def fields(**keys) -> Fields:
    return Fields(keys, "config.json", Problems(Path("dir")))


def test_a_missing_key_is_named_with_its_type_and_file():
    config = fields()
    assert config.need(int, "hidden_size") == 0
    assert config.problems.lines == ["config.json: missing hidden_size (an integer)"]


@pytest.mark.parametrize(
    "kind, value",
    [
        (int, 1.5),
        (int, True),
        (int, "1"),
        (bool, 1),
        (float, "x"),
        (float, False),
        (str, 1),
        (list, {}),
    ],
)
def test_a_wrong_type_is_named_with_its_value(kind, value):
    config = fields(key=value)
    config.find(kind, "key")
    assert len(config.problems.lines) == 1
    assert f"config.json: key is {value!r}" in config.problems.lines[0]
    assert config.problems.is_fatal


def test_an_integer_is_a_number_and_null_is_absent():
    config = fields(theta=10000, window=None)
    assert config.get(float, "theta", 1.0) == 10000.0
    assert config.find(int, "window") is None
    assert "window" in config.nulls


def test_wrappers_are_opened_and_sources_say_where():
    config = fields(
        model_type="outer",
        eagle_config={"norm_before_fc": True},
        transformer_layer_config={"model_type": "llama", "hidden_size": 8},
    )
    assert config.need(int, "hidden_size") == 8
    assert config.get(str, "model_type", "") == "llama"
    assert config.source("hidden_size") == "config.json: transformer_layer_config.hidden_size"
    assert config.source("norm_before_fc") == "config.json: eagle_config.norm_before_fc"
    assert config.source("absent") == "default"


def test_lists_of_integers_may_be_one_integer():
    assert fields(eos=3).ints("eos") == (3,)
    assert fields(eos=[3, 4]).ints("eos") == (3, 4)
    config = fields(eos=[3, "4"])
    assert config.ints("eos") is None
    assert "integers are needed" in config.problems.lines[0]


@pytest.mark.parametrize("text", [None, "{", "[]", "\xff"])
def test_a_config_that_is_no_json_object_is_fatal(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
    problems = Problems(tmp_path)
    assert read_json_object(tmp_path / "config.json", problems) == {}
    with pytest.raises(CheckpointError, match=r"config\.json"):
        problems.raise_if_fatal()
