"""Senseless numbers and switches: each is a CheckpointError that names file and key, or loads."""

import json
import math
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.weights.formats import FORMATS
from tests.weights.tiny import (
    draft_tensors,
    eagle1_config,
    eagle3_config,
    tiny_target,
    write_target,
)
from weights import CheckpointError, inspect_checkpoint, load_eagle, load_target

TARGET = tiny_target()
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
WRONG_SIZES = (0, -1, -(10**30), 10**30)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
NO_SCALE = (0, 0.0, -1.0, math.nan, math.inf, -math.inf, 10**400, -(10**400))

ODD = [
    *(
        (key, value)
        for key in ("intermediate_size", "max_position_embeddings")
        for value in WRONG_SIZES
    ),
    *(
        (key, value)
        for key in ("num_attention_heads", "num_key_value_heads")
        for value in WRONG_SIZES
    ),
    *(("num_hidden_layers", value) for value in (0, -1, -(10**30))),
    *(("head_dim", value) for value in (0, -2, 15, 2**40)),
    *(("rms_norm_eps", value) for value in (math.inf, -math.inf, math.nan, -1e-5, 10**400, 1e300)),
    *(("rope_theta", value) for value in (*NO_SCALE, 1, 1e300)),
    *(("architectures", value) for value in ("LlamaForCausalLM", 5, [5], {"a": 1})),
    *(("layer_types", value) for value in ("sliding_attention", [None])),
    ("partial_rotary_factor", 10**400),
]
ODD_OF_A_TARGET = [(key, value) for key in ("hidden_size", "vocab_size") for value in WRONG_SIZES]
ODD_OF_A_DRAFT = [("attention_bias", value) for value in (1.5, 1, 0, "false", [])]
ODD_ROPE = [
    *(({"rope_type": "linear"}, "factor", value) for value in NO_SCALE),
    *(
        (LLAMA3, key, value)
        for key in ("factor", "low_freq_factor", "high_freq_factor")
        for value in NO_SCALE
    ),
    *((LLAMA3, "low_freq_factor", value) for value in (4, 4.0, 8.0)),
    *((LLAMA3, "high_freq_factor", value) for value in (1.0, 0.5)),
    *(
        (YARN, key, value)
        for key in ("factor", "beta_fast", "beta_slow", "attention_factor")
        for value in NO_SCALE
    ),
    *((YARN, "beta_slow", value) for value in (33, 1000.0)),
    *(
        (YARN, key, value)
        for key in ("mscale", "mscale_all_dim")
        for value in (-1.0, math.nan, math.inf, 10**400)
    ),
    *(
        (rope, "original_max_position_embeddings", value)
        for rope in (LLAMA3, YARN)
        for value in WRONG_SIZES
    ),
]


def write_draft(directory, format="eagle-3", **changes):
    config = eagle1_config(TARGET) if format == "eagle-1" else eagle3_config(TARGET)
    FORMATS[format].write(directory, config, draft_tensors(config), TARGET)
    keys = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(
        json.dumps({key: value for key, value in keys.items() if value is not None})
    )


def refusals(directory, load):
    """What the load says, and that `inspect` says it too."""
    with pytest.raises(CheckpointError) as error:
        load()
    for problem in error.value.problems:
        assert re.search(r"\.(json|safetensors)\b", problem), problem  # each line names a file
    inspected = inspect_checkpoint(directory)
    assert inspected.problems
    assert str(inspected)
    return str(error.value)


@pytest.mark.parametrize("key, value", [*ODD, *ODD_OF_A_TARGET])
def test_an_odd_value_in_a_target_is_refused_by_name(tmp_path, key, value):
    write_target(tmp_path, TARGET, **{"rope_parameters": None, key: value})
    text = refusals(tmp_path, lambda: load_target(tmp_path, progress=False))
    assert "config.json: " in text
    assert key in text


@pytest.mark.parametrize("key, value", [*ODD, *ODD_OF_A_DRAFT])
def test_an_odd_value_in_a_draft_is_refused_by_name(tmp_path, key, value):
    write_draft(tmp_path, **{key: value})
    text = refusals(tmp_path, lambda: load_eagle(tmp_path, TARGET, progress=False))
    assert "config.json: " in text
    assert key in text


@pytest.mark.parametrize("rope, key, value", ODD_ROPE)
def test_an_odd_rope_is_refused_by_name(tmp_path, rope, key, value):
    write_target(tmp_path / "target", TARGET, rope_parameters=rope | {key: value})
    write_draft(tmp_path / "draft", rope_theta=None, rope_scaling=rope | {key: value})
    text = refusals(tmp_path / "target", lambda: load_target(tmp_path / "target", progress=False))
    assert "config.json: rope_parameters: " in text
    assert key in text
    text = refusals(
        tmp_path / "draft", lambda: load_eagle(tmp_path / "draft", TARGET, progress=False)
    )
    assert "config.json: rope_scaling: " in text
    assert key in text


def test_a_yarn_draft_without_any_length_is_refused(tmp_path):
    write_draft(
        tmp_path, max_position_embeddings=None, rope_scaling={"rope_type": "yarn", "factor": 2}
    )
    text = refusals(tmp_path, lambda: load_eagle(tmp_path, TARGET, progress=False))
    assert "config.json: rope_scaling: missing original_max_position_embeddings" in text


@pytest.mark.parametrize("id", [96, -5, 10**6, 2**70, [1, 96], [1, -1]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_eos_id_outside_the_vocabulary_is_refused_by_name(tmp_path, file, id):
    write_target(tmp_path, TARGET)
    keys = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(keys | {"eos_token_id": id}))
    text = refusals(tmp_path, lambda: load_target(tmp_path, progress=False))
    assert f"{file}: eos_token_id is" in text
    assert "from 0 to 95" in text


def test_the_last_id_of_the_vocabulary_may_end_a_text(tmp_path):
    write_target(tmp_path, TARGET, eos_token_id=[0, 95])
    assert load_target(tmp_path, progress=False).config.eos_token_ids == (0, 95, 1, 2)


@pytest.mark.parametrize("ids", [[-1, 3, 4], [2, 3, 2**70], -1])
@pytest.mark.parametrize("format", ["specforge", "speculators-eagle3"])
def test_a_tap_before_the_target_is_refused(tmp_path, format, ids):
    taps = {"eagle_aux_hidden_state_layer_ids": ids}
    write_draft(tmp_path, format, **({"eagle_config": taps} if format == "specforge" else taps))
    text = refusals(tmp_path, lambda: load_eagle(tmp_path, TARGET, progress=False))
    assert "eagle_aux_hidden_state_layer_ids is" in text
    assert "integers are needed from 0" in text


def test_heads_that_do_not_divide_are_refused(tmp_path):
    write_target(tmp_path, TARGET, num_attention_heads=5)
    text = refusals(tmp_path, lambda: load_target(tmp_path, progress=False))
    assert (
        "config.json: num_attention_heads is 5, a multiple of num_key_value_heads, 2, is needed"
        in text
    )


@pytest.mark.parametrize("heads", [5, 64])
def test_a_head_dim_that_no_key_states_is_checked_too(tmp_path, heads):
    keys = {
        "head_dim": None,
        "hidden_size": 35,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    write_target(tmp_path, TARGET, **keys)
    text = refusals(tmp_path, lambda: load_target(tmp_path, progress=False))
    assert "config.json: hidden_size / num_attention_heads: head_dim is" in text


def test_a_draft_without_a_width_is_refused(tmp_path):
    write_draft(tmp_path)
    file = tmp_path / "model.safetensors"
    empty = {
        "midlayer.mlp.gate_proj.weight": torch.zeros(0, 32),
        "midlayer.mlp.up_proj.weight": torch.zeros(0, 32),
        "midlayer.mlp.down_proj.weight": torch.zeros(32, 0),
    }
    save_file(load_file(file) | empty, file)
    text = refusals(tmp_path, lambda: load_eagle(tmp_path, TARGET, progress=False))
    assert (
        "model.safetensors: shape of layers.0.mlp.down_proj.weight: intermediate_size is 0" in text
    )


@pytest.mark.parametrize("number", ["\u00b2", "9" * 5000])
def test_a_layer_of_an_odd_number_is_an_unexpected_tensor(tmp_path, number):
    write_draft(tmp_path)
    file, name = tmp_path / "model.safetensors", f"layers.{number}.mlp.up_proj.weight"
    save_file(load_file(file) | {name: torch.zeros(1)}, file)
    assert "model.safetensors: unexpected layers." in refusals(
        tmp_path, lambda: load_eagle(tmp_path, TARGET, progress=False)
    )


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_a_table_of_another_rank_is_not_read(tmp_path, name):
    write_draft(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: torch.zeros(0, dtype=tensors[name].dtype)}, file)
    raw = file.read_bytes()
    stop = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:stop])
    header[name]["shape"] = [0, 2**62, 2**62]  # torch cannot make it
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[stop:])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name} is \[0, "):
        load_eagle(tmp_path, TARGET, progress=False)


NUMBERS = st.one_of(
    st.integers(),
    st.integers(-2, 100),
    st.floats(),
    st.sampled_from([2**31, 2**63, 2**70, 10**400, -(10**400), 1e308, -0.0, 5e-324]),
)
SCALARS = st.one_of(NUMBERS, st.booleans(), st.none(), st.text(max_size=8))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)
ROPES = st.dictionaries(
    st.sampled_from(
        ["rope_type", "type", "rope_theta", "truncate", "partial_rotary_factor", *YARN, *LLAMA3]
    )
    | st.sampled_from(
        [
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "attention_factor",
            "low_freq_factor",
        ]
    ),
    st.sampled_from(["linear", "llama3", "yarn", "default"]) | VALUES,
)
KEYS = [
    *(
        *SIZES,
        "head_dim",
        "vocab_size",
        "draft_vocab_size",
        "target_hidden_size",
        "max_position_embeddings",
    ),
    *(
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "eos_token_id",
        "bos_token_id",
    ),
    *(
        "architectures",
        "model_type",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
    ),
    *(
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "hidden_act",
        "quantization_config",
        "eagle_config",
    ),
    *(
        "eagle_aux_hidden_state_layer_ids",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "text_config",
        "model",
    ),
    *(
        "use_aux_hidden_state",
        "speculators_model_type",
        "transformer_layer_config",
        "partial_rotary_factor",
    ),
]
CONFIGS = st.dictionaries(st.sampled_from(KEYS), ROPES | VALUES, max_size=4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    write_target(directory / "target", TARGET)
    for format in ("eagle-3", "eagle-1"):
        write_draft(directory / format, format)
    configs = {
        part.name: json.loads((part / "config.json").read_text()) for part in directory.iterdir()
    }
    return directory, configs


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(part=st.sampled_from(["target", "eagle-3", "eagle-1"]), changes=CONFIGS)
def test_any_config_loads_or_is_a_checkpoint_error(pair, part, changes):
    directory, configs = pair[0] / part, pair[1]
    (directory / "config.json").write_text(json.dumps(configs[part] | changes))
    inspected = str(inspect_checkpoint(directory))
    assert all(line.isprintable() for line in inspected.split("\n"))
    try:
        loaded = (
            load_target(directory, progress=False)
            if part == "target"
            else load_eagle(directory, TARGET)
        )
    except CheckpointError:
        return
    layer = loaded.config.layers[0] if part == "target" else loaded.config.layer
    assert 0 <= layer.rms_norm_eps <= 1
    assert layer.rope.theta > 1
    assert math.isfinite(layer.rope.theta)
