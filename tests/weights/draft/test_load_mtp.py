"""An MTP head among its target's tensors: MiMo's."""

import dataclasses
import json
import random
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import SpeculativeConfig
from specdec.start.runners import check_method
from tests.weights.draft.head import mutate
from tests.weights.draft.test_formats import MTP
from tests.weights.formats import FORMATS
from tests.weights.tiny import draft_tensors, eagle1_config, tiny_target
from weights import CheckpointError, inspect_checkpoint, load_eagle, load_target

TARGET = tiny_target("mimo")
CONFIG = eagle1_config(TARGET, qkv_bias=True, **MTP)
PREFIX = "model.mtp_layers.0."


@pytest.fixture
def directory(tmp_path):
    FORMATS["mimo-mtp"].write(tmp_path, CONFIG, draft_tensors(CONFIG), TARGET)
    return tmp_path


def change(directory, **tensors):
    """Give files other tensors, or none of these names."""
    file = directory / "model.safetensors"
    held = load_file(file) | tensors
    save_file({name: x for name, x in held.items() if x is not None}, file)


def test_target_and_head_are_read_from_one_directory(directory):
    target = load_target(directory, progress=False)
    assert target.tensors.keys() == TARGET.tensors.keys()
    assert {name for name, _ in target.report.ignored} == {
        name for name in load_file(directory / "model.safetensors") if name.startswith(PREFIX)
    }
    head = load_eagle(directory, target, progress=False)
    assert dataclasses.replace(head.config, format="any") == CONFIG
    assert (head.config.format, head.config.method) == ("mimo-mtp", "mtp")
    assert head.tensors.keys() == draft_tensors(CONFIG).keys()
    assert head.report.ignored == ()
    check_method(SpeculativeConfig(directory, method="mtp"), head.config)
    with pytest.raises(ValueError, match=r"is an? mtp draft .* or method='mtp'"):
        check_method(SpeculativeConfig(directory, method="eagle"), head.config)
    assert inspect_checkpoint(directory).report.role == "target"


@pytest.mark.parametrize(
    "name, words",
    [
        ("hidden_layernorm.weight", "missing feature_norm.weight [32]"),
        ("token_layernorm.weight", "missing embed_norm.weight [32]"),
        ("final_layernorm.weight", "missing norm.weight [32]"),
        ("input_layernorm.weight", "missing layers.0.input_layernorm.weight [32]"),
        ("self_attn.q_proj.weight", "missing layers.0.self_attn.q_proj.weight [64, 32]"),
    ],
)
def test_a_head_without_one_of_its_tensors_is_refused(directory, name, words):
    change(directory, **{PREFIX + name: None})
    with pytest.raises(CheckpointError) as error:
        load_eagle(directory, TARGET, progress=False)
    assert words in str(error.value)


def test_a_second_head_is_refused_by_its_names(directory):
    change(directory, **{"model.mtp_layers.1.input_proj.weight": torch.zeros(32, 64)})
    with pytest.raises(CheckpointError, match=r"unexpected model\.mtp_layers\.1\.input_proj"):
        load_eagle(directory, TARGET, progress=False)


def test_a_target_without_a_head_is_no_draft(directory):
    held = load_file(directory / "model.safetensors")
    change(directory, **{name: None for name in held if name.startswith(PREFIX)})
    with pytest.raises(CheckpointError, match="no known draft"):
        load_eagle(directory, TARGET, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_a_mutated_head_is_one_error_or_loads(directory, seed):
    file, keys = directory / "model.safetensors", directory / "config.json"
    held = load_file(file)
    own = {name: held.pop(name) for name in list(held) if name.startswith(PREFIX)}
    head = SimpleNamespace(keys=json.loads(keys.read_text()), tensors=own)
    mutate(head, random.Random(seed))
    keys.write_text(json.dumps(head.keys))
    save_file(held | head.tensors, file)
    with suppress(CheckpointError):  # any other error fails
        load_eagle(directory, TARGET, progress=False)
