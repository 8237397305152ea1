"""Heads for gpt-oss: their ids are boundaries in every format; the rest is what formats say."""

import dataclasses
import json

import pytest
from safetensors.torch import load_file, save_file

from specdec.cli.verify import read_as
from tests.weights.formats import FORMATS
from tests.weights.tiny import draft_tensors, eagle3_config, tiny_target
from weights import CheckpointError, RopeConfig, load_eagle

PLAIN = tiny_target()
TARGET = dataclasses.replace(PLAIN, config=dataclasses.replace(PLAIN.config, model_type="gpt_oss"))
L = TARGET.config.num_layers
KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def load(tmp_path):
    """load(format, changes of its config, ids, keys of config.json and eagle_config)."""

    def build(format, ids=None, target=TARGET, inner=None, drop=(), **changes):
        keys = changes.pop("keys", {})
        config = eagle3_config(PLAIN, **changes)
        FORMATS[format].write(tmp_path, config, draft_tensors(config), PLAIN)
        found = json.loads((tmp_path / "config.json").read_text()) | keys
        holder = found.setdefault("eagle_config", {}) if inner or ids else {}
        holder |= inner or {}
        for each in (found, holder):
            for key in (KEY, "aux_hidden_state_layer_ids", "target_layer_ids"):
                each.pop(key, None)
        if ids is not None:
            holder[KEY] = ids
        (tmp_path / "config.json").write_text(json.dumps(found))
        tensors = load_file(tmp_path / "model.safetensors")
        save_file(
            {k: x for k, x in tensors.items() if k not in drop}, tmp_path / "model.safetensors"
        )
        return load_eagle(tmp_path, target, progress=False)

    return build


@pytest.mark.parametrize("format", ["specforge", "modelopt", "eagle-3", "speculators-eagle3"])
def test_ids_are_boundaries_in_every_format(load, format):
    loaded = load(format, ids=[1, 3, 4])
    assert loaded.config.aux_boundaries == (1, 3, 4)
    taps = read_as(TARGET.report, loaded.report)["taps"]
    assert "boundaries, as all heads for gpt-oss have them" in taps
    assert "taps read as outputs of layers would be the boundaries [2, 4, 5]" in taps


@pytest.mark.parametrize("format", ["specforge", "modelopt"])
def test_other_targets_heads_keep_their_formats_ids(load, format):
    assert load(format, ids=[1, 3, 4], target=PLAIN).config.aux_boundaries == (2, 4, 5)


def test_the_last_boundary_is_after_the_last_layer(load):
    """As NVIDIA's third head names them, with a norm before fc and a d2t in any order."""
    loaded = load("modelopt", ids=[2, 5, L], norm_before_fc=True)
    assert loaded.config.aux_boundaries == (2, 5, L)
    assert loaded.config.norm_before_fc
    assert loaded.tensors["input_norm.weight"].shape == (3 * 32,)


def test_a_head_without_taps_reads_the_targets_hidden_states(load):
    """As NVIDIA's short head: no fc, and the target's embedding."""
    loaded = load(
        "modelopt",
        inner={"use_aux_hidden_state": False},
        drop=("fc.weight", "input_norm.weight"),
        aux_boundaries=(),
        has_fc=False,
    )
    assert loaded.config.aux_boundaries == ()
    assert not loaded.config.has_fc
    assert not loaded.config.has_own_embedding


def test_yarn_is_the_heads_own(load):
    scaling = {
        **{"rope_type": "yarn", "factor": 32.0, "truncate": False},
        "original_max_position_embeddings": 4096,
    }
    keys = {"rope_scaling": scaling, "rope_theta": 150000}
    loaded = load("modelopt", ids=[1, 3, 4], keys=keys)
    assert loaded.config.layer.rope == RopeConfig(
        theta=150000.0,
        kind="yarn",
        factor=32.0,
        original_max_position_embeddings=4096,
        truncate=False,
    )


def test_heads_that_draft_in_parallel_are_refused_by_name(load):
    with pytest.raises(CheckpointError, match="EagleMedusa"):
        load("modelopt", inner={"parallel_draft_step": 4})
