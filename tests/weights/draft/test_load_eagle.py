"""Attacks on a draft give one CheckpointError that names file and key; quiet decisions are told."""

import dataclasses
import re
import sys

import pytest
import torch

from tests.weights.draft.head import Head
from tests.weights.formats import FORMATS
from tests.weights.tiny import draft_tensors, eagle1_config, eagle3_config, tiny_target
from weights import CheckpointError, load_eagle

TARGET = tiny_target()


def head_of(directory, format="eagle-3", config=None):
    return Head(directory, FORMATS[format], config or eagle3_config(TARGET), TARGET)


@pytest.fixture
def head(tmp_path):
    return head_of(tmp_path)


@pytest.fixture
def eagle1(tmp_path):
    return head_of(tmp_path, "eagle-1", eagle1_config(TARGET))


ATTACKS = {
    "no lm_head and a smaller vocabulary": (
        lambda t: t.pop("lm_head.weight"),
        ["missing lm_head.weight [40, 32]"],
    ),
    "no d2t and a smaller vocabulary": (lambda t: t.pop("d2t"), ["missing d2t [40]"]),
    "no fc": (lambda t: t.pop("fc.weight"), ["missing fc.weight [32, 96]"]),
    "no norm": (lambda t: t.pop("norm.weight"), ["missing norm.weight [32]"]),
    "no hidden_norm": (
        lambda t: t.pop("midlayer.hidden_norm.weight"),
        ["missing layers.0.hidden_norm.weight [32]"],
    ),
    "attention of EAGLE-1 beside a hidden_norm": (
        lambda t: t.update(
            {
                name: tensor[:, :32].clone()
                for name, tensor in t.items()
                if re.search("self_attn.[qkv]_proj", name)
            }
        ),
        [
            "midlayer.self_attn.q_proj.weight is [32, 32], [32, 64] is needed",
            "midlayer.self_attn.k_proj.weight is [16, 32], [16, 64] is needed",
            "midlayer.self_attn.v_proj.weight is [16, 32], [16, 64] is needed",
        ],
    ),
    "no input_layernorm": (
        lambda t: t.pop("midlayer.input_layernorm.weight"),
        ["missing layers.0.input_layernorm.weight"],
    ),
    "a float d2t": (
        lambda t: t.update(d2t=t["d2t"].float()),
        ["model.safetensors: d2t is F32: integers are needed"],
    ),
    "an integer t2d": (lambda t: t.update(t2d=t["t2d"].int()), ["t2d is I32: BOOL is needed"]),
    "d2t out of range": (lambda t: t["d2t"].add_(60), ["outside 0..95"]),
    "d2t below zero": (lambda t: t["d2t"].fill_(-1), ["outside 0..95, the first to -1"]),
    "d2t twice": (
        lambda t: t.update(d2t=torch.arange(40).neg()),
        ["several draft tokens to one target id"],
    ),
    "a short d2t": (lambda t: t.update(d2t=t["d2t"][:-1]), ["d2t is [39], [40] is needed"]),
    "t2d disagrees": (
        lambda t: t["t2d"].logical_not_(),
        ["t2d and d2t disagree about 96 target tokens"],
    ),
    "a short t2d": (lambda t: t.update(t2d=t["t2d"][:-1].clone()), ["t2d is [95], [96] is needed"]),
    "a wrong shape": (
        lambda t: t.update({"midlayer.self_attn.o_proj.weight": torch.zeros(32, 7)}),
        ["midlayer.self_attn.o_proj.weight is [32, 7], [32, 32] is needed"],
    ),
    "a wrong rank": (
        lambda t: t.update({"fc.weight": torch.zeros(32)}),
        ["fc.weight is [32], [32, 96] is needed"],
    ),
    "an unknown key": (
        lambda t: t.update(gate=torch.zeros(3)),
        ["model.safetensors: unexpected gate [3]"],
    ),
    "a bias of q alone": (
        lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.zeros(32)}),
        [
            "missing layers.0.self_attn.k_proj.bias [16]",
            "missing layers.0.self_attn.v_proj.bias [16]",
        ],
    ),
    "fp8": (
        lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}),
        ["fc.weight is F8_E4M3: packed, fp8 and integer weights are not supported"],
    ),
    "integer weights": (
        lambda t: t.update({"fc.weight": t["fc.weight"].char()}),
        ["fc.weight is I8: packed, fp8"],
    ),
    "packed weights": (
        lambda t: t.update({"fc.weight_packed": t.pop("fc.weight").int()}),
        ["fc.weight_packed is I32: packed, fp8", "missing fc.weight"],
    ),
    "one tensor under two names": (
        lambda t: t.update({"layers.0.hidden_norm.weight": torch.ones(32)}),
        ["are both layers.0.hidden_norm.weight"],
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_on_the_tensors_is_refused_by_name(head, attack):
    spoil, words = ATTACKS[attack]
    spoil(head.tensors)
    text = head.refusal()
    assert all(word in text for word in words), text


CONFIGS = {
    "no heads": ({"num_attention_heads": None}, "missing num_attention_heads (an integer)"),
    "another hidden size written": ({"hidden_size": 48}, "hidden_size is 48, the shape of"),
    "another draft vocabulary written": (
        {"draft_vocab_size": 41},
        "draft_vocab_size is 41, the shape of lm_head.weight says 40",
    ),
    "another vocabulary": (
        {"vocab_size": 128},
        "a draft for another vocabulary: config.json: vocab_size says 128, the target has 96",
    ),
    "another target": (
        {"target_hidden_size": 64},
        "a draft for another hidden size: config.json: target_hidden_size says 64",
    ),
    "more layers": ({"num_hidden_layers": 2}, "missing layers.1.self_attn.q_proj.weight [32, 32]"),
    "a million layers": ({"num_hidden_layers": 10**6}, "1000000 layers, but only"),
    "a norm that is not there": ({"norm_before_fc": True}, "missing input_norm.weight [96]"),
    "norms that are not there": ({"fc_norm": True}, "missing fc_norm.2.weight [32]"),
    "a norm that should not be there": ({"use_last_layernorm": False}, "unexpected norm.weight"),
    "both norms before fc": ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
    "too many taps": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]},
        "fc.weight takes 3 hidden states of the target, 4 layers",
    ),
    "a tap after the target's last layer": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]},
        "must lie in 0..8, the target has 8 layers",
    ),
    "words for taps": ({"eagle_aux_hidden_state_layer_ids": ["1"]}, "integers are needed"),
    "a rope that is not built": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope type 'dynamic' is not supported",
    ),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "another kind of layer": (
        {"layer_types": ["chunked_attention"]},
        "layer_types chunked_attention",
    ),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
}


@pytest.mark.parametrize("attack", CONFIGS)
def test_an_attack_on_the_config_is_refused_by_name(head, attack):
    changes, words = CONFIGS[attack]
    head.keys |= changes
    assert words in head.refusal()


KINDS = {
    "EagleMedusa": ({}, {"parallel_draft_heads.0.lm_head.weight": torch.zeros(1)}),
    "EagleMedusa (parallel draft heads)": ({"eagle_config": {"parallel_draft_step": 4}}, {}),
    "MTP": ({}, {"model.layers.0.eh_proj.weight": torch.zeros(1)}),
    "MLA": ({}, {"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(1)}),
    "MLA draft": ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}),
    "GRIFFIN": ({"architectures": ["GriffinModel"]}, {}),
    "mixture-of-experts": ({}, {"layers.0.mlp.experts.0.up_proj.weight": torch.zeros(1)}),
    "attention sinks": ({}, {"layers.0.self_attn.sinks": torch.zeros(4)}),
    "speculators_model_type 'mlp_speculator'": ({"speculators_model_type": "mlp_speculator"}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_draft_that_is_not_built_is_refused_by_name(head, kind):
    keys, tensors = KINDS[kind]
    head.keys |= keys
    head.tensors |= tensors
    text = head.refusal()
    assert kind in text
    assert "1 problem, nothing loaded" in text


def test_a_directory_that_is_no_draft_is_refused(head):
    head.tensors = {"model.embed_tokens.weight": torch.zeros(96, 32)}
    assert "no known draft" in head.refusal()


def test_everything_wrong_comes_in_one_error(head):
    del head.tensors["norm.weight"], head.tensors["midlayer.mlp.up_proj.weight"]
    head.tensors["fc.weight"] = torch.zeros(31, 96)
    head.tensors["d2t"] += 60
    head.tensors["surprise"] = torch.zeros(1)
    head.keys["hidden_act"] = "gelu"
    text = head.refusal()
    words = (
        "missing norm",
        "missing layers.0.mlp.up_proj",
        "fc.weight is [31, 96]",
        "outside 0..95",
        "surprise",
        "gelu",
    )
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "width, vocab_size, words",
    [(64, 96, "hidden size"), (48, 96, "hidden size"), (32, 80, "vocabulary")],
)
@pytest.mark.parametrize("format", ["eagle-3", "eagle-1"])
def test_a_draft_for_another_target_is_refused(tmp_path, format, width, vocab_size, words):
    layer = dataclasses.replace(TARGET.config.layers[0], hidden_size=width)
    other = dataclasses.replace(TARGET.config, layers=(layer,) * 8, vocab_size=vocab_size)
    config = eagle1_config(TARGET) if format == "eagle-1" else eagle3_config(TARGET)
    text = head_of(tmp_path, format, config).refusal(dataclasses.replace(TARGET, config=other))
    assert f"a draft for another {words}" in text


def test_an_eagle1_draft_of_another_width_than_its_target_is_refused(tmp_path):
    config = eagle1_config(TARGET, hidden_size=48, has_own_embedding=True, has_own_head=True)
    eagle1 = head_of(tmp_path, "eagle-1", config)
    eagle1.keys["target_hidden_size"] = 32
    assert "an EAGLE-1 draft of hidden size 48 for a target of 32" in eagle1.refusal()


def test_ignored_keys_of_an_eagle1_config_are_noted(eagle1):
    asked = {
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_before_residual": True,
        "norm_output": True,
    }
    eagle1.keys |= {
        **asked,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "return_hidden_post_norm": False,
    }
    loaded = eagle1.load()
    assert (loaded.config.recycled, loaded.config.aux_boundaries) == ("pre_norm", ())
    notes = [note.split(" is ignored: ") for note in loaded.report.notes]
    ignored = {parts[0] for parts in notes if len(parts) > 1}
    keys = (*asked, "eagle_aux_hidden_state_layer_ids")
    assert ignored == {f"config.json: {key}" for key in keys}


def test_the_error_for_a_bin_only_draft_names_the_command(head):
    (head.directory / "model.safetensors").rename(head.directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"specdec convert"):
        load_eagle(head.directory, TARGET)


def test_a_wrong_head_dim_is_inferred_and_noted(tmp_path):
    head = head_of(tmp_path, "angelslim", eagle3_config(TARGET, head_dim=16))
    assert head.keys["head_dim"] == 8
    loaded = head.load()
    assert loaded.config.layer.head_dim == 16
    assert any("head_dim is 8" in note for note in loaded.report.notes)


def test_an_attention_bias_without_tensors_is_not_built(head):
    head.keys["attention_bias"] = True
    assert not head.load().config.layer.qkv_bias


def test_rope_is_the_drafts_own_never_the_targets(head):
    rope = dataclasses.replace(TARGET.config.layers[0].rope, theta=5e5)
    layer = dataclasses.replace(TARGET.config.layers[0], rope=rope)
    config = dataclasses.replace(TARGET.config, layers=(layer,) * 8)
    target = dataclasses.replace(TARGET, config=config)
    del head.keys["rope_theta"]
    assert head.load(target).config.layer.rope.theta == 10000.0


def test_aux_layers_overrides_what_the_checkpoint_says(head):
    head.keys["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    loaded = head.load(aux_layers=(2, 5, 8))
    assert loaded.config.aux_boundaries == (2, 5, 8)
    assert "argument aux_layers" in str(loaded.report)
    assert "fc.weight takes 3 hidden states of the target, 2 layers" in head.refusal(
        aux_layers=(2, 5)
    )
    assert "more than once" in head.refusal(aux_layers=(2, 5, 5))


@pytest.mark.parametrize(
    "key", ["eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"]
)
def test_too_few_layers_name_the_key_to_change(head, key):
    head.keys.pop("eagle_aux_hidden_state_layer_ids", None)
    head.keys[key] = [1, 3]
    words = f"list as many in config.json's {key}, or in Python's aux_layers"
    assert words in head.refusal()


def test_aux_layers_for_a_draft_without_taps_is_refused(eagle1):
    assert "aux_layers (2, 4, 5): this draft reads none" in eagle1.refusal(aux_layers=(2, 4, 5))


def test_the_report_names_the_id_convention(tmp_path):
    outputs = head_of(tmp_path / "a", "specforge").load()
    boundaries = head_of(tmp_path / "b", "speculators-eagle3").load()
    assert outputs.config.aux_boundaries == boundaries.config.aux_boundaries == (2, 4, 5)
    assert "[1, 3, 4] (outputs of layers, as specforge has them, +1)" in str(outputs.report)
    assert "(boundaries, as speculators-eagle3 has them)" in str(boundaries.report)
    advice = "if drafts agree too seldom, give these as aux_layers"
    assert outputs.report.notes[:1] == (
        f"taps read as boundaries would be the boundaries [1, 3, 4]: {advice}",
    )
    assert boundaries.report.notes == (
        f"taps read as outputs of layers would be the boundaries [3, 5, 6]: {advice}",
    )


def test_ids_that_can_be_read_in_one_way_have_no_other(head):
    head.keys["eagle_aux_hidden_state_layer_ids"] = [2, 5, TARGET.config.num_layers]
    assert head.load().report.notes == ()
    assert head.load(aux_layers=(2, 4, 5)).report.notes == ()


def test_the_two_meanings_of_norm_output(tmp_path):
    forge = head_of(tmp_path / "a", "specforge")
    speculators = head_of(tmp_path / "b", "speculators-eagle3")
    forge.keys["norm_output"] = speculators.keys["norm_output"] = True
    assert forge.load().config.recycled == "pre_norm"
    assert any("norm_output in a specforge head" in note for note in forge.load().report.notes)
    assert speculators.load().config.recycled == "post_norm"


def test_speculators_eagle3_norms_before_the_residual_unless_it_says_otherwise(tmp_path):
    head = head_of(tmp_path, "speculators-eagle3")
    del head.keys["norm_before_residual"]
    loaded = head.load()
    assert loaded.config.norm_before_residual
    assert "default of speculators-eagle3" in str(loaded.report)


@pytest.mark.parametrize("has_tied_head", [False, True])
def test_copies_of_the_targets_embedding_and_head_are_dropped(tmp_path, has_tied_head):
    target = tiny_target(has_tied_head=has_tied_head, dtype="bfloat16")
    config = eagle1_config(target)
    FORMATS["eagle-1-vllm"].write(tmp_path, config, draft_tensors(config), target)
    loaded = load_eagle(tmp_path, target, progress=False)
    assert not loaded.config.has_own_embedding
    assert not loaded.config.has_own_head
    assert not {"embed_tokens.weight", "lm_head.weight"} & loaded.tensors.keys()
    assert "lm_head.weight equals the target's, the copy is dropped" in str(loaded.report)


def test_one_different_row_makes_the_embedding_the_drafts_own(eagle1):
    assert not eagle1.load().config.has_own_embedding
    eagle1.tensors["embed_tokens.weight"][7, 3] += 1
    loaded = eagle1.load()
    assert loaded.config.has_own_embedding
    assert torch.equal(loaded.tensors["embed_tokens.weight"], eagle1.tensors["embed_tokens.weight"])


def test_the_draft_takes_the_targets_dtype_with_one_line(tmp_path):
    target = tiny_target(dtype="bfloat16")
    loaded = head_of(tmp_path).load(target)
    assert {tensor.dtype for name, tensor in loaded.tensors.items() if name != "d2t"} == {
        torch.bfloat16
    }
    assert loaded.tensors["d2t"].dtype == torch.int64
    assert [note for note in loaded.report.notes if "cast" in note] == [
        "13 tensors stored as F32 are cast to bfloat16"
    ]
    half = head_of(tmp_path).load(target, dtype=torch.float16)
    assert half.tensors["fc.weight"].dtype == torch.float16


def test_zero_offsets_over_the_full_vocabulary_are_no_d2t(tmp_path):
    head = head_of(tmp_path, config=eagle3_config(TARGET, has_d2t=False, draft_vocab_size=96))
    head.tensors |= {
        "d2t": torch.zeros(96, dtype=torch.int64),
        "t2d": torch.ones(96, dtype=torch.bool),
    }
    loaded = head.load()
    assert not loaded.config.has_d2t
    assert "d2t" not in loaded.tensors


def test_harmless_leftovers_are_ignored_and_listed(head):
    head.tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    head.tensors["model.verifier_norm.weight"] = torch.ones(32)
    (head.directory / "training_state.pt").write_bytes(b"not read")
    ignored = dict(head.load().report.ignored)
    assert ignored.keys() == {
        "midlayer.self_attn.rotary_emb.inv_freq",
        "model.verifier_norm.weight",
        "t2d",
        "training_state.pt",
    }


@pytest.mark.parametrize("prefix", ["model.", "draft_model.", "eagle_module.model."])
def test_wrapping_prefixes_are_stripped(head, prefix):
    plain = head.load()
    head.tensors = {prefix + name: tensor for name, tensor in head.tensors.items()}
    wrapped = head.load()
    assert wrapped.config == plain.config
    assert all(torch.equal(wrapped.tensors[name], plain.tensors[name]) for name in plain.tensors)


def test_a_progress_bar_counts_the_bytes_on_a_terminal(head, capfd, monkeypatch):
    load_eagle(head.directory, TARGET)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_eagle(head.directory, TARGET)
    assert "B/s" in capfd.readouterr().err
    load_eagle(head.directory, TARGET, progress=False)
    assert capfd.readouterr().err == ""


def test_two_names_for_one_tensor_are_told_with_their_files(head):
    head.tensors["layers.0.hidden_norm.weight"] = torch.ones(32)
    assert (
        "model.safetensors: midlayer.hidden_norm.weight and model.safetensors: "
        "layers.0.hidden_norm.weight are both layers.0.hidden_norm.weight"
    ) in head.refusal()
