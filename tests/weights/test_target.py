"""Targets of all families: config to binding, and what is refused."""

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weights.tiny import tiny_target, write_target
from weights import CheckpointError, load_target
from weights.arrange import FUSED
from weights.families.table import FAMILIES
from weights.files.reader import Reader


def refusal(directory) -> CheckpointError:
    with pytest.raises(CheckpointError) as error:
        load_target(directory, progress=False)
    for problem in error.value.problems:
        assert re.search(r"\.(json|safetensors)\b", problem), problem  # each line names a file
    return error.value


@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if row.experts is None])
@pytest.mark.parametrize("has_tied_head", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_target_comes_back_as_it_was_written(tmp_path, family, has_tied_head, num_shards):
    target = tiny_target(family, has_tied_head=has_tied_head)
    write_target(tmp_path, target, num_shards)
    loaded = load_target(tmp_path, progress=False)
    assert loaded.config == dataclasses.replace(target.config, eos_token_ids=(1, 2))
    assert loaded.tensors.keys() == target.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], target.tensors[name]) for name in target.tensors)


def test_products_are_fused_in_the_order_of_their_names(tmp_path):
    target = tiny_target("qwen2")
    write_target(tmp_path, target)
    pieces = load_file(tmp_path / "model.safetensors")
    tensors = load_target(tmp_path, progress=False).tensors
    for owner, (whole, parts) in zip(("self_attn", "mlp"), FUSED.items(), strict=True):
        prefix = f"layers.3.{owner}"
        expected = torch.cat([pieces[f"model.{prefix}.{part}.weight"] for part in parts])
        assert torch.equal(tensors[f"{prefix}.{whole}.weight"], expected)


def test_the_stored_dtype_is_kept_and_a_cast_is_noted(tmp_path):
    write_target(tmp_path, tiny_target(dtype="bfloat16"))
    kept = load_target(tmp_path, progress=False)
    assert {tensor.dtype for tensor in kept.tensors.values()} == {torch.bfloat16}
    assert kept.config.dtype == "bfloat16"
    assert kept.report.notes == ()
    cast = load_target(tmp_path, dtype=torch.float32, progress=False)
    assert {tensor.dtype for tensor in cast.tensors.values()} == {torch.float32}
    assert cast.report.notes == ("75 tensors stored as BF16 are cast to float32",)
    assert cast.config.dtype == "bfloat16"


@pytest.mark.parametrize(
    "own, generation, expected",
    [(1, [1, 2], (1, 2)), ([3, 1], 7, (3, 1, 7)), (None, [5], (5,)), (4, None, (4,))],
)
def test_eos_ids_of_both_files_count(tmp_path, own, generation, expected):
    write_target(tmp_path, tiny_target(), eos_token_id=own)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_target(tmp_path, progress=False).config.eos_token_ids == expected


@pytest.mark.parametrize(
    "family, keys, window",
    [
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 64}, 64),
        ("llama", {"sliding_window": 64}, None),
        ("llama", {"sliding_window": 64, "layer_types": ["full_attention"] * 8}, None),
        ("llama", {"sliding_window": 64, "layer_types": ["sliding_attention"] * 8}, 64),
        ("llama", {"sliding_window": None, "layer_types": ["sliding_attention"] * 8}, None),
        ("qwen2", {"sliding_window": 64}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, 64),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 8}, None),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 8,
            },
            None,
        ),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] * 8,
            },
            64,
        ),
    ],
)
def test_windows_are_those_of_the_layers_that_have_one(tmp_path, family, keys, window):
    write_target(tmp_path, tiny_target(family), **keys)
    layers = load_target(tmp_path, progress=False).config.layers
    start = keys.get("max_window_layers", 0)
    expected = [None] * start + [window] * (len(layers) - start)
    assert [kind.window for kind in layers] == expected


def test_layers_with_windows_are_listed_one_by_one(tmp_path):
    kinds = [f"{('full', 'sliding')[i % 3 > 0]}_attention" for i in range(8)]
    write_target(tmp_path, tiny_target("llama"), layer_types=kinds, sliding_window=24)
    loaded = load_target(tmp_path, progress=False)
    expected = [None if i % 3 == 0 else 24 for i in range(8)]
    assert [kind.window for kind in loaded.config.layers] == expected
    assert len(loaded.config.kinds) == 2
    assert loaded.config.within(24).kinds == loaded.config.layers[:1]
    assert len(loaded.config.within(25).kinds) == 2
    config = json.loads((tmp_path / "config.json").read_text()) | {"layer_types": kinds[:7]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "layer_types has 7 entries, and there are 8 layers" in str(refusal(tmp_path))


def test_windows_without_a_size_are_refused(tmp_path):
    write_target(tmp_path, tiny_target("llama"), layer_types=["sliding_attention"] * 8)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("sliding_window", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "config.json: missing sliding_window (an integer)" in str(refusal(tmp_path))


def test_a_tied_target_may_carry_an_equal_head_and_no_other(tmp_path):
    write_target(tmp_path, tiny_target(has_tied_head=True))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert "lm_head.weight" not in load_target(tmp_path, progress=False).tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    assert "lm_head.weight differs from the embedding" in str(refusal(tmp_path))


def test_harmless_leftovers_are_ignored_and_listed(tmp_path):
    write_target(tmp_path, tiny_target())
    file = tmp_path / "model.safetensors"
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.self_attn.masked_bias": torch.ones(1),
    }
    save_file(load_file(file) | extra, file)
    (tmp_path / "training_state.pt").write_bytes(b"not read")
    report = load_target(tmp_path, progress=False).report
    assert {name for name, _ in report.ignored} == {*extra, "training_state.pt"}
    assert all(name in str(report) for name in extra)


@pytest.mark.parametrize(
    "keys, words",
    [
        (
            {"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"]},
            "model_type 'gemma3' is not supported",
        ),
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' is not supported"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "only LlamaForCausalLM is supported",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"hidden_size": None}, "missing hidden_size (an integer)"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers, but only 75 tensors"),
        ({"vocab_size": "many"}, "vocab_size is 'many', an integer is needed"),
    ],
)
def test_a_target_that_is_not_built_is_refused_by_name(tmp_path, keys, words):
    write_target(tmp_path, tiny_target(), **keys)
    assert words in str(refusal(tmp_path))


def test_everything_wrong_comes_in_one_error(tmp_path):
    write_target(tmp_path, tiny_target(), hidden_act="gelu")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(32, 8)
    tensors["model.layers.0.self_attn.q_proj.weight_packed"] = torch.zeros(4, dtype=torch.int32)
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(32, 48).to(torch.float8_e4m3fn)
    tensors["model.surprise"] = torch.zeros(1)
    save_file(tensors, file)
    error = refusal(tmp_path)
    for words in (
        "hidden_act 'gelu' is not supported",
        "missing lm_head.weight [96, 32]",
        "missing layers.2.mlp.up_proj.weight [48, 32]",
        "model.layers.1.self_attn.o_proj.weight is [32, 8], [32, 64] is needed",
        "layers.0.self_attn.q_proj.weight_packed is I32: packed, fp8 and integer weights are not",
        "model.layers.0.mlp.down_proj.weight is F8_E4M3",
        "unexpected model.surprise [1]",
    ):
        assert words in str(error), words
    assert len(error.problems) == 7


def test_an_error_while_reading_reaches_the_caller(tmp_path, monkeypatch):
    write_target(tmp_path, tiny_target())

    def fail(reader, name, *_):
        if name.endswith("layers.1.mlp.up_proj.weight"):
            raise OSError("the disk is gone")

    monkeypatch.setattr(Reader, "read_into", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        load_target(tmp_path, progress=False)
