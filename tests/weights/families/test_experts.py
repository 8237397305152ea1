"""Targets with experts: how their tensors are arranged, and what is refused."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weights.published import TARGETS, save
from weights import CheckpointError, ExpertsConfig, inspect_checkpoint, load_target
from weights.errors import Problems
from weights.families.experts import have_experts
from weights.families.table import FAMILIES
from weights.fields import Fields
from weights.report import Log


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(name): the model of transformers, and its directory."""

    @cache
    def build(name):
        directory = tmp_path_factory.mktemp("target")
        return save(name, directory), directory

    return build


@pytest.fixture
def broken(saved, tmp_path):
    """broken(name, change, **keys): the error of a target after changes of tensors and config."""

    def build(name, change=None, **keys):
        _, directory = saved(name)
        tensors = load_file(directory / "model.safetensors")
        if change is not None:
            change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        config = json.loads((directory / "config.json").read_text()) | keys
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError) as error:
            load_target(tmp_path, progress=False)
        return error.value

    return build


def config_of(saved, tmp_path, name, *absent, **keys):
    """The config of a target after changes of config.json."""
    _, directory = saved(name)
    config = json.loads((directory / "config.json").read_text()) | keys
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key not in absent})
    )
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    return load_target(tmp_path, progress=False).config


@pytest.mark.parametrize("name", TARGETS)
def test_tensors_are_those_that_transformers_has_in_memory(saved, name):
    model, directory = saved(name)
    state = {key.removeprefix("model."): value for key, value in model.state_dict().items()}
    state = {key.replace("block_sparse_moe.router", "mlp.gate"): x for key, x in state.items()}
    state = {key.replace("block_sparse_moe", "mlp"): value for key, value in state.items()}
    loaded = load_target(directory, progress=False).tensors
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for key, tensor in loaded.items():
        pieces = next((names for whole, names in parts.items() if f".{whole}." in key), (None,))
        whole = "gate_up_proj" if len(pieces) == 2 else "qkv_proj"
        found = [state.pop(key if part is None else key.replace(whole, part)) for part in pieces]
        assert torch.equal(tensor, torch.cat(found)), key
    assert state == {}


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"mlp_only_layers": []}, [1, 1, 1, 1, 1]),
        ({"mlp_only_layers": [0, 3, 99]}, [0, 1, 1, 0, 1]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1, 0]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 0, 0, 1, 0]),
    ],
)
def test_layers_with_experts_are_those_of_the_config(keys, expected):
    problems = Problems(Path())
    row = FAMILIES["qwen3_moe"].experts
    assert have_experts(Fields(keys, "config.json", problems), row, 5, Log()) == expected
    assert problems.lines == []


def test_kinds_of_layers_are_shared(saved, tmp_path):
    config = config_of(saved, tmp_path, "qwen3_moe, a dense layer")
    assert [kind.experts is None for kind in config.layers] == [False] * 3 + [True] + [False] * 2
    assert len(config.kinds) == len({id(kind) for kind in config.layers}) == 2
    assert [kind.intermediate_size for kind in config.kinds] == [0, 80]
    assert config.kinds[0].experts == ExpertsConfig(num=12, per_token=3, width=24, renormalise=True)


def test_weights_are_not_renormalised_where_the_config_does_not_say_so(saved, tmp_path):
    config = config_of(saved, tmp_path, "qwen3_moe, a dense layer", "norm_topk_prob")
    assert not config.layers[0].experts.renormalise


@pytest.mark.parametrize("keys", [{"num_experts": 12}, {"num_experts": None}])
def test_the_older_name_of_the_number_of_experts_is_read(saved, tmp_path, keys):
    config = config_of(saved, tmp_path, "qwen3_moe, a dense layer", **keys)
    assert config.layers[0].experts.num == 12
    name = "qwen3_moe, every second"
    (tmp_path / "model.safetensors").unlink()
    config = config_of(saved, tmp_path, name, "num_local_experts", num_experts=12)
    assert config.layers[1].experts.num == 12


@pytest.mark.parametrize(
    "name, keys, window",
    [
        ("mixtral", {}, None),
        ("mixtral", {"sliding_window": 64}, 64),
        ("qwen3_moe, a dense layer", {"sliding_window": 64}, None),
        ("qwen3_moe, a dense layer", {"sliding_window": 64, "use_sliding_window": True}, 64),
    ],
)
def test_a_window_is_that_of_all_layers(saved, tmp_path, name, keys, window):
    absent = () if "sliding_window" in keys else ("sliding_window",)
    layers = config_of(saved, tmp_path, name, *absent, **keys).layers
    assert {kind.window for kind in layers} == {window}


@pytest.mark.parametrize(
    "keys, line",
    [
        ({"num_experts": 8}, "num_experts is 8 and num_local_experts is 12: keep one"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok is 13, and there are 12 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0, an integer from 1"),
        ({"num_local_experts": 10**9}, "1000000000 experts in 5 layers, but only"),
        ({"mlp_only_layers": ["a"]}, "mlp_only_layers is ['a'], integers are needed"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0, an integer from 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, true or false is needed"),
    ],
)
def test_an_odd_value_is_refused_by_name(broken, keys, line):
    assert line in str(broken("qwen3_moe, a dense layer", **keys))


def test_multipliers_that_turn_scores_around_are_refused(broken):
    error = broken("granitemoe", attention_multiplier=-1.0, logits_scaling=0)
    assert "attention_multiplier is -1.0, a number from 1e-06" in str(error)
    assert "logits_scaling is 0, a number from 1e-06" in str(error)


def spoil_qwen3(tensors):
    layer = "model.layers.1.mlp"
    del tensors[f"{layer}.gate.weight"]
    del tensors[f"{layer}.experts.7.down_proj.weight"]
    tensors[f"{layer}.experts.12.up_proj.weight"] = torch.zeros(24, 48)
    tensors[f"{layer}.experts.3.gate_proj.weight"] = torch.zeros(48, 24)
    tensors["model.layers.3.mlp.gate.weight"] = torch.zeros(12, 48)  # of a dense layer


def spoil_mixtral(tensors):
    layer = "model.layers.1.block_sparse_moe"
    del tensors[f"{layer}.experts.7.w2.weight"]
    tensors["model.layers.1.mlp.gate.weight"] = tensors[f"{layer}.gate.weight"].clone()
    tensors[f"{layer}.experts.0.w3.weight"] = torch.zeros(24, 48).to(torch.float8_e4m3fn)


def spoil_granite(tensors):
    layer = "model.layers.1.block_sparse_moe"
    del tensors[f"{layer}.router.layer.weight"]
    tensors[f"{layer}.input_linear.weight"] = torch.zeros(13, 48, 48)
    tensors[f"{layer}.output_linear.weight"] = torch.zeros(12, 24, 48)


@pytest.mark.parametrize(
    "name, spoil, lines",
    [
        (
            "qwen3_moe, a dense layer",
            spoil_qwen3,
            [
                "missing layers.1.mlp.gate.weight [12, 48]",
                "missing layers.1.mlp.experts.7.down_proj.weight [48, 24]",
                "unexpected model.layers.1.mlp.experts.12.up_proj.weight [24, 48]",
                "layers.1.mlp.experts.3.gate_proj.weight is [48, 24], [24, 48] is needed",
                "unexpected model.layers.3.mlp.gate.weight [12, 48]",
            ],
        ),
        (
            "mixtral",
            spoil_mixtral,
            [
                "missing layers.1.mlp.experts.7.down_proj.weight [48, 24]",
                "model.layers.1.mlp.gate.weight and model.safetensors: ",
                "are both layers.1.mlp.gate.weight",
                "experts.0.w3.weight is F8_E4M3: plain numbers are needed, unless",
            ],
        ),
        (
            "granitemoe",
            spoil_granite,
            [
                "missing layers.1.mlp.gate.weight [12, 48]",
                "input_linear.weight is [13, 48, 48], [12, 48, 48] is needed",
                "output_linear.weight is [12, 24, 48], [12, 48, 24] is needed",
            ],
        ),
    ],
)
def test_what_is_wrong_with_tensors_comes_in_one_error(broken, name, spoil, lines):
    text = str(broken(name, spoil))
    for line in lines:
        assert line in text, text


def test_a_table_of_tensors_has_a_line_for_all_experts(saved):
    """Also where layers between them have none."""
    _, directory = saved("qwen3_moe, a dense layer")
    text = str(inspect_checkpoint(directory))
    assert "model.layers.{0..2,4..5}.mlp.experts.{0..11}.down_proj.weight" in text
    assert len(text.splitlines()) < 50
