"""The script that writes FP8: what it writes is read, and means nearly what it was."""

import json

import pytest
import torch
from safetensors.torch import load_file

from scripts import quantise
from tests.weights.fp8 import FORMS, numbers_of, save_odd
from tests.weights.published import save
from weights import demo_directory, load_target

STEP = 2**-4  # half of the distance between two codes, of the number itself
LEAST = 2**-9 / 448 * 1.01  # of the largest number that has the scale: below codes are evenly apart


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_the_nearest_of_their_scale(tmp_path, form):
    save_odd("qwen3", tmp_path / "plain")
    quantise.main([str(tmp_path / "plain"), str(tmp_path / "fp8"), "--form", form])
    plain, found = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "fp8"))
    scales = {name for name in found if "weight_scale" in name}
    assert len(scales) == 2 * 7
    for name, expected in plain.items():
        [scale] = scales & {f"{name}_scale", f"{name}_scale_inv"} or [None]
        if scale is None:
            assert torch.equal(found[name], expected)
            continue
        numbers = numbers_of(found[name], found[scale])
        bound = torch.maximum(expected.abs() * STEP, expected.abs().max() * LEAST)
        assert bool(((numbers - expected).abs() <= bound).all()), name
    config = load_target(tmp_path / "fp8", progress=False).config
    assert {*config.layers[0].forms} == {f"fp8 {form}"}


def test_shards_keep_their_index(tmp_path):
    quantise.main(["demo", str(tmp_path / "fp8"), "--form", "block"])
    loaded = load_target(tmp_path / "fp8", progress=False)
    assert not loaded.report.notes
    names = {file.name for file in (tmp_path / "fp8").iterdir()}
    assert names == {file.name for file in demo_directory("target").iterdir()}


@pytest.mark.parametrize("form, key", [("channel", "ignore"), ("block", "modules_to_not_convert")])
def test_heads_and_routers_are_said_to_be_plain(tmp_path, form, key):
    """Other readers take every other product for FP8."""
    save_odd("qwen3_moe", tmp_path / "plain")
    quantise.write(tmp_path / "plain", tmp_path / "fp8", form)
    how = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert how[key] == ["lm_head", "model.layers.0.mlp.gate"]
    assert not load_target(tmp_path / "fp8", progress=False).report.notes


def test_a_family_without_fp8_is_refused(tmp_path):
    save("gpt_oss", tmp_path / "plain")
    with pytest.raises(ValueError, match="weights of gpt_oss are not read in FP8"):
        quantise.main([str(tmp_path / "plain"), str(tmp_path / "fp8"), "--form", "block"])
    assert not (tmp_path / "fp8").exists()


def test_a_target_in_fp8_is_not_quantised_again(tmp_path):
    save_odd("llama", tmp_path / "plain")
    quantise.write(tmp_path / "plain", tmp_path / "fp8", "block")
    with pytest.raises(ValueError, match="is quantised already"):
        quantise.write(tmp_path / "fp8", tmp_path / "again", "channel")
