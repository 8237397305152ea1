"""How long a context may be: what config.json says, times what its rope is stretched by."""

import dataclasses

import pytest
import torch

from specdec import LLM
from specdec.config import EngineConfig
from specdec.start.sizing import check_weights, largest_sizes
from specdec.start.speculation import drafting_of
from tests.weights.gpt_oss import write_both_forms
from tests.weights.published import save
from tests.weights.tiny import tiny_target
from weights import RopeConfig
from weights.files.reader import Reader


def max_model_len(rope, given=None):
    """Of a target with max_position_embeddings=256."""
    target = tiny_target().config
    kind = dataclasses.replace(target.layers[0], rope=rope)
    target = dataclasses.replace(target, layers=(kind,) * target.num_layers)
    drafting = drafting_of(None, has_graphs=False)
    return largest_sizes(EngineConfig(max_model_len=given), drafting, target, None).max_model_len


def yarn(original, factor):
    return RopeConfig(kind="yarn", factor=factor, original_max_position_embeddings=original)


@pytest.mark.parametrize(
    "rope, longest",
    [
        (RopeConfig(), 256),
        (RopeConfig(kind="linear", factor=2.5), 640),
        (RopeConfig(kind="llama3", factor=8.0, original_max_position_embeddings=128), 256),
        (yarn(256, 4.0), 1024),
        (yarn(200, 4.0), 800),
        pytest.param(yarn(64, 4.0), 256, id="raised already"),
        pytest.param(yarn(16, 4.0), 256, id="raised further"),
    ],
)
def test_a_stretched_rope_lengthens_the_context(rope, longest):
    assert max_model_len(rope) == longest
    assert max_model_len(rope, longest) == longest
    with pytest.raises(ValueError, match=rf"max_model_len={longest + 1} exceeds the target's"):
        max_model_len(rope, longest + 1)


def test_the_limit_says_what_it_is_made_of():
    with pytest.raises(ValueError, match=r"the target's 1024 positions \(yarn rope: 256 \* 4\)$"):
        max_model_len(yarn(256, 4.0), 1025)


def test_packed_weights_take_what_they_take_in_every_dtype(tmp_path):
    save("gpt_oss", tmp_path / "target")
    write_both_forms(tmp_path / "target", tmp_path / "packed", tmp_path / "plain")
    reader = Reader(tmp_path / "packed")
    packed = sum(each.num_bytes for each in reader.entries.values() if each.dtype == "U8")
    whole = sum(each.num_bytes for each in reader.entries.values())
    need = packed + (whole - packed) // 2
    check_weights(reader, torch.bfloat16, need + 1)
    with pytest.raises(ValueError, match="the weights take"):
        check_weights(reader, torch.bfloat16, need)


def test_weights_that_no_device_holds_are_refused_before_they_are_read(tmp_path, monkeypatch):
    """Experts count, and so does the dtype in which they are loaded."""
    save("qwen3_moe, a dense layer", tmp_path)
    reader = Reader(tmp_path)
    need = sum(each.num_bytes for each in reader.entries.values())
    check_weights(reader, None, need + 1)
    check_weights(reader, torch.bfloat16, need // 2 + 1)
    with pytest.raises(ValueError, match=r"the weights take 0.00 GiB as stored, the device has"):
        check_weights(reader, None, need)
    with pytest.raises(ValueError, match=r"GiB in bfloat16, .*: give a device with more"):
        check_weights(reader, torch.bfloat16, need // 2)
    monkeypatch.setattr("specdec.start.load.device_memory", lambda device: need)
    monkeypatch.setattr("specdec.start.runners.load_target", None)
    with pytest.raises(ValueError, match=r"the weights take 0.00 GiB in float32"):
        LLM(tmp_path, tokenizer="demo", device="cpu")
