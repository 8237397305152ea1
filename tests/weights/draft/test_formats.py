"""One draft, every format that can express it: the same binding and identical tensors."""

import dataclasses

import pytest
import torch

from tests.weights.formats import FORMATS
from tests.weights.tiny import draft_tensors, eagle1_config, eagle3_config, tiny_target
from weights import RopeConfig, load_eagle

YARN = RopeConfig(
    theta=5e5, kind="yarn", factor=32.0, original_max_position_embeddings=64, beta_fast=16.0
)
LLAMA3 = RopeConfig(
    theta=5e5,
    kind="llama3",
    factor=8.0,
    original_max_position_embeddings=64,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
FULL = {"has_d2t": False, "draft_vocab_size": 96}

# what is set: at least how many formats can express it
EAGLE3 = [
    ({}, 6),
    ({"norm_before_residual": True}, 2),
    ({"norm_before_fc": True}, 3),
    ({"has_fc_norm": True}, 4),
    ({"recycled": "post_norm"}, 4),
    ({"has_fc_norm": True, "recycled": "post_norm"}, 3),
    ({"norm_before_residual": True, "norm_before_fc": True, "recycled": "post_norm"}, 2),
    ({"qk_norm": True}, 3),
    ({"qkv_bias": True}, 2),
    ({"qkv_bias": True, "o_bias": True, "mlp_bias": True}, 2),
    ({"has_final_norm": False}, 2),
    ({"has_input_layernorm": False}, 1),
    ({"num_layers": 2}, 4),
    ({"num_layers": 3, "norm_before_residual": True, "has_fc_norm": True}, 2),
    ({"aux_boundaries": (5,)}, 4),
    ({"aux_boundaries": (1, 7)}, 4),
    ({"aux_boundaries": (2, 4, 6)}, 4),
    ({"aux_boundaries": (6, 7, 8)}, 4),
    ({"aux_boundaries": (0, 4, 7)}, 2),
    ({"aux_boundaries": (1, 2, 4, 7)}, 4),
    ({"aux_boundaries": (2, 3, 5, 6, 8), "has_fc_norm": True}, 3),
    ({"aux_boundaries": (2, 3, 5, 6, 7), "qk_norm": True, **FULL}, 3),
    ({"aux_boundaries": (2, 3, 5, 6, 7), "qk_norm": True, "has_own_head": False, **FULL}, 3),
    ({"aux_boundaries": (), "has_fc": False}, 1),
    ({"aux_boundaries": (), "has_fc": False, "has_own_head": False, **FULL}, 1),
    (FULL, 6),
    ({"has_own_head": False, **FULL}, 6),
    ({"has_own_embedding": True}, 6),
    ({"hidden_size": 24, "has_own_embedding": True}, 4),
    ({"hidden_size": 24, "has_own_embedding": True, "norm_before_fc": True}, 3),
    ({"hidden_size": 24, "has_own_embedding": True, "has_fc_norm": True, **FULL}, 3),
    ({"head_dim": 16}, 6),
    ({"rope": LLAMA3}, 6),
    ({"rope": YARN}, 6),
    ({"rope": RopeConfig(theta=1e6, kind="linear", factor=4.0)}, 6),
    ({"window": 16}, 2),
]
MTP = {
    **{"has_embed_norm": True, "has_feature_norm": True, "has_input_layernorm": True},
    **{"has_final_norm": True, "recycled": "post_norm", "fc_bias": False},
    **{"head_dim": 16, "max_position_embeddings": 256},
}
EAGLE1 = [
    ({}, 3),
    ({"fc_bias": False}, 3),
    ({"qkv_bias": True}, 3),
    ({"has_own_embedding": True}, 3),
    ({"has_own_head": True}, 2),
    ({"num_layers": 2}, 2),
    (
        {
            "has_embed_norm": True,
            "has_input_layernorm": True,
            "has_final_norm": True,
            "recycled": "post_norm",
        },
        1,
    ),
    (MTP, 1),
]


@pytest.mark.parametrize("features, at_least", EAGLE3, ids=lambda value: _name(value))
def test_an_eagle3_draft_binds_alike_in_every_format(tmp_path, features, at_least):
    target = tiny_target()
    check_round_trips(tmp_path, eagle3_config(target, **features), target, at_least)


@pytest.mark.parametrize("features, at_least", EAGLE1, ids=lambda value: _name(value))
@pytest.mark.parametrize("has_tied_head", [False, True])
def test_an_eagle1_draft_binds_alike_in_every_format(tmp_path, features, at_least, has_tied_head):
    target = tiny_target(has_tied_head=has_tied_head)
    check_round_trips(tmp_path, eagle1_config(target, **features), target, at_least)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_recognised_as_itself(tmp_path, name):
    target = tiny_target()
    taps = {"aux_boundaries": (2, 3, 5, 6, 7), "qk_norm": True, **FULL}
    candidates = [eagle1_config(target), eagle3_config(target), eagle3_config(target, **taps)]
    candidates.append(eagle1_config(target, **MTP))
    config = next(config for config in candidates if FORMATS[name].can_express(config, target))
    FORMATS[name].write(tmp_path, config, draft_tensors(config), target)
    # vLLM has no format of its own for EAGLE-3, only other names for the same flags
    expected = "eagle-3" if name == "eagle-3-vllm" else name
    assert load_eagle(tmp_path, target, progress=False).config.format == expected


def check_round_trips(tmp_path, config, target, at_least):
    tensors = draft_tensors(config)
    able = [name for name, format in FORMATS.items() if format.can_express(config, target)]
    assert len(able) >= at_least, able
    for name in able:
        FORMATS[name].write(tmp_path / name, config, tensors, target)
        loaded = load_eagle(tmp_path / name, target, progress=False)
        assert dataclasses.replace(loaded.config, format="any") == config, name
        assert loaded.tensors.keys() == tensors.keys(), name
        assert all(torch.equal(loaded.tensors[key], tensors[key]) for key in tensors), name


def _name(value):
    return ",".join(value) or "plain" if isinstance(value, dict) else str(value)
