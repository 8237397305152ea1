"""Block drafts from files: the same binding in every format, and refusals by name."""

import random

import pytest
from safetensors.torch import save_file

from tests.weights.blocks import DFLASH2, DSPARK, FORMATS, block_config
from tests.weights.draft.head import Head, check_formats, check_mutated
from tests.weights.tiny import tiny_target, write_target
from weights import RopeConfig, inspect_checkpoint

TARGET = tiny_target("qwen3")
D2T = {"has_d2t": True, "draft_vocab_size": 40, "has_own_head": True}
YARN = RopeConfig(theta=5e5, kind="yarn", factor=8.0, original_max_position_embeddings=64)

# what is set: how many formats can express it
FEATURES = [
    ({}, 2),
    ({"anchor_proposes": True}, 3),
    (DSPARK, 3),
    (DSPARK | {"anchor_proposes": False}, 2),
    (DSPARK | {"markov": "gated", "confidence": "hidden"}, 3),
    (DSPARK | {"markov": "rnn", "confidence": None}, 3),
    (DSPARK | {"markov_rank": 256}, 3),
    ({"confidence": "hidden"}, 2),
    (DSPARK | D2T, 1),
    (D2T, 1),
    (DSPARK | {"has_own_embedding": True, "has_own_head": True}, 2),
    ({"aux_boundaries": (0, 1, 8)}, 2),
    ({"aux_boundaries": (5,), "num_layers": 1}, 2),
    ({"aux_boundaries": (2, 3, 5, 6, 7), "num_layers": 5}, 2),
    ({"qkv_bias": True, "qk_norm": False}, 2),
    ({"rope": YARN, "block_size": 16, "mask_token_id": 95}, 2),
    (DFLASH2, 2),
    ({"conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}, 2),
    (DFLASH2 | {"anchor_proposes": True}, 1),
    (DFLASH2 | {"has_own_embedding": True, "has_own_head": True}, 1),
]


@pytest.mark.parametrize("features, num_formats", FEATURES, ids=str)
def test_a_block_draft_binds_alike_in_every_format(tmp_path, features, num_formats):
    found = check_formats(tmp_path, block_config(TARGET, **features), TARGET, FORMATS)
    assert len(found) == num_formats


def head_of(directory, format="deepspec-dspark", **changes):
    return Head(directory, FORMATS[format], block_config(TARGET, **DSPARK | changes), TARGET)


PLAIN = {"markov": None, "markov_rank": 0, "confidence": None, "anchor_proposes": False}
OF_FORMAT = {"dflash": PLAIN, "dflash2": PLAIN | DFLASH2}


def test_formats_are_told_apart(tmp_path):
    found = {}
    for format in FORMATS:
        found[format] = (
            head_of(tmp_path / format, format, **OF_FORMAT.get(format, {})).load().config
        )
    assert {name: config.format for name, config in found.items()} == {
        "dflash": "dflash",
        "dflash2": "dflash2",
        "specforge-dspark": "specforge-dspark",
        "deepspec-dspark": "deepspec-dspark",
        "speculators": "speculators-dspark",
    }
    assert {name: config.method for name, config in found.items()} == {
        **dict.fromkeys(FORMATS, "dspark"),
        **{name: name for name in OF_FORMAT},
    }
    for method, changes in OF_FORMAT.items():
        config = head_of(tmp_path / f"speculators {method}", "speculators", **changes).load().config
        assert (config.format, config.method) == (f"speculators-{method}", method)


def test_what_configs_leave_out_is_the_formats_default(tmp_path):
    zlab = head_of(tmp_path / "zlab", "dflash", **PLAIN)
    del zlab.keys["dflash_config"]["target_layer_ids"], zlab.keys["block_size"]
    loaded = zlab.load()
    assert (loaded.config.aux_boundaries, loaded.config.block_size) == ((2, 6), 16)  # outputs 1, 5
    one = head_of(tmp_path / "one", "dflash", **PLAIN, num_layers=1, aux_boundaries=(3,))
    del one.keys["dflash_config"]["target_layer_ids"]
    assert one.load().config.aux_boundaries == (5,)
    early = head_of(tmp_path / "early", "specforge-dspark")
    early.tensors = {
        f"logit_head.{name}" if name.startswith(("markov", "confidence")) else name: tensor
        for name, tensor in early.tensors.items()
    }
    assert early.load().config.markov == "vanilla"
    modules = head_of(tmp_path / "modules", "dflash2", **PLAIN | DFLASH2)
    modules.tensors = {
        f"{name}.weight" if name.endswith("codebook") else name: tensor
        for name, tensor in modules.tensors.items()
    }
    assert modules.load().config.selector_rank == 12


@pytest.mark.parametrize(
    "format, key, ids, boundaries",
    [
        ("deepspec-dspark", "target_layer_ids", [-1, 7], (0, 8)),
        ("speculators", "aux_hidden_state_layer_ids", [0, 8], (0, 8)),
        ("deepspec-dspark", "target_layer_ids", [1, 4], (2, 5)),
        ("speculators", "aux_hidden_state_layer_ids", [1, 4], (1, 4)),
    ],
)
def test_layer_ids_are_boundaries_or_outputs_by_format(tmp_path, format, key, ids, boundaries):
    head = head_of(tmp_path, format)
    head.keys[key] = ids
    assert head.load().config.aux_boundaries == boundaries
    assert head.load(aux_layers=(3, 6)).config.aux_boundaries == (3, 6)


# what changes: config keys (None: it goes), tensors, and words of the refusal
REFUSED = {
    "dflash2": ({"architectures": ["DFlash2DraftModel"]}, {}, "missing conv_group_size"),
    "a selector": (
        {},
        {"candidate_selector.predecessor_codebook": (96, 4)},
        "unexpected candidate",
    ),
    "domino": ({"projector_type": "domino"}, {}, "Domino"),
    "domino, tensors": ({}, {"prefix_gru.weight_ih_l0": (4, 32)}, "Domino"),
    "windows": ({"layer_types": ["full_attention", "sliding_attention"]}, {}, "with windows"),
    "swa": ({"use_swa": True}, {}, "with windows"),
    "causal": ({"is_causal": True}, {}, "causal"),
    "causal heads": ({"is_causal": [0, 1]}, {}, "some heads of them, are causal"),
    "causal block": ({"causal": True}, {}, "causal"),
    "sinks": ({"attention_sink_bias": True}, {}, "attention sinks"),
    "sinks, tensors": ({}, {"layers.0.self_attn.sinks": (4,)}, "attention sinks"),
    "experts": ({}, {"layers.0.mlp.experts.0.up_proj.weight": (4, 32)}, "mixture-of-experts"),
    "mla": ({"attention_mode": "mla"}, {}, "MLA"),
    "mla, tensors": ({}, {"layers.0.self_attn.q_a_proj.weight": (4, 32)}, "MLA"),
    "kda": ({"attention_modes": ["kda", "gqa"]}, {}, "latent or linear attention"),
    "mask embedding": ({}, {"mask_embedding": (32,)}, "mask has an embedding of its own"),
    "mask outside": ({"mask_token_id": 96}, {}, "the embedding has rows 0 to 95"),
    "no mask": ({"mask_token_id": None}, {}, "missing mask_token_id"),
    "no size": ({"block_size": None}, {}, "missing block_size"),
    "size of one": ({"block_size": 1}, {}, "block_size is 1"),
    "no taps": ({"target_layer_ids": None}, {}, "missing aux_hidden_state_layer_ids"),
    "taps outside": ({"target_layer_ids": [1, 8]}, {}, "must lie in 0..8"),
    "one tap": ({"target_layer_ids": [1]}, {}, "takes 2 hidden states"),
    "rnn after an anchor": (
        {"markov_head_type": "rnn", "sample_from_anchor": False},
        {},
        "'rnn' beside an anchor that proposes nothing",
    ),
    "another head": ({"markov_head_type": "lstm"}, {}, "only vanilla, gated, rnn"),
    "another rank": ({"markov_rank": 7}, {}, "markov_rank is 7"),
    "gemma": ({"architectures": ["Gemma4DSparkModel"]}, {}, "Gemma"),
    "projector": ({"projector_type": "dta"}, {}, "only dflash, dspark"),
    "scaled embedding": ({"input_embedding_scale": 2.0}, {}, "scales its embedding"),
    "softcap": ({"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping"),
    "no fc": ({}, {"fc.weight": None}, "missing fc.weight"),
    "no markov_w2": ({}, {"markov_head.markov_w2.weight": None}, "missing markov_head.markov_w2"),
    "no confidence": ({}, {"confidence_head.proj.bias": None}, "missing confidence_head.proj.bias"),
    "more": ({}, {"markov_head.gate_proj.weight": (12, 44)}, "unexpected markov_head.gate_proj"),
}


OF_DFLASH2 = {  # keys stand in dflash_config
    "no groups": ({"conv_group_size": None}, {}, "missing conv_group_size"),
    "no top_k": ({"selector_top_k": None}, {}, "missing selector_top_k"),
    "groups": ({"conv_group_size": 5}, {}, "a divisor of hidden_size, 32, is needed"),
    "other groups": ({"conv_group_size": 4}, {}, "kernel_projection.weight is [16, 32]"),
    "no group": ({"conv_group_size": 0}, {}, "conv_group_size is 0"),
    "more taps": ({"conv_kernel_size": 3}, {}, "another number of taps"),
    "three taps": ({}, {"layers.1.mlp_conv.base_kernel": (2, 3, 32)}, "[2, 2, 32] is needed"),
    "no kernel": ({}, {"layers.0.attention_conv.base_kernel": None}, "missing layers.0.attention"),
    "another rank": ({"selector_rank": 7}, {}, "selector_rank is 7"),
    "many": ({"selector_top_k": 65}, {}, "selector_top_k is 65"),
    "no codebook": ({}, {"candidate_selector.successor_codebook": None}, "missing candidate"),
    "some ids": ({}, {"lm_head.weight": (40, 32)}, "some of the target's 96 ids"),
    "few ids": ({"selector_top_k": 50}, {"lm_head.weight": (40, 32)}, "is 50, the draft has 40"),
    "markov": ({"markov_rank": 4}, {}, "a markov_head beside a selector"),
    "softcap": ({"final_logit_softcapping": 20.0}, {}, "final_logit_softcapping"),
    "multiplier": ({"output_multiplier": 0.2}, {}, "scales its logits"),
    "causal": ({"is_causal": True}, {}, "causal"),
    "mla": ({"attention_mode": "mla"}, {}, "MLA"),
}


@pytest.mark.parametrize("attack", OF_DFLASH2)
def test_what_no_dflash2_draft_has_is_refused_by_name(tmp_path, attack):
    head = head_of(tmp_path, "dflash2", **PLAIN | DFLASH2)
    keys, tensors, words = OF_DFLASH2[attack]
    own = head.keys["dflash_config"] | keys
    head.keys["dflash_config"] = {k: v for k, v in own.items() if v is not None}
    head.replace(tensors)
    assert words in head.refusal()


@pytest.mark.parametrize("attack", REFUSED)
def test_what_is_not_built_or_does_not_fit_is_refused_by_name(tmp_path, attack):
    head = head_of(tmp_path)
    keys, tensors, words = REFUSED[attack]
    head.keys = {k: v for k, v in (head.keys | keys).items() if v is not None}
    head.replace(tensors)
    assert words in head.refusal()


@pytest.mark.parametrize("format", FORMATS)
def test_a_block_draft_is_inspected_with_and_without_its_target(tmp_path, format):
    head = head_of(tmp_path, format, **OF_FORMAT.get(format, {}))
    for target in (None, TARGET.config):
        found = inspect_checkpoint(head.directory, target)
        assert (found.problems, found.report.role) == ((), "draft")
        assert {"block_size", "mask_token_id", "anchor_proposes"} <= {
            row.field for row in found.report.fields
        }
    head.tensors.pop("norm.weight")
    save_file(head.tensors, head.directory / "model.safetensors")
    [problem] = inspect_checkpoint(head.directory).problems
    assert "missing norm.weight" in problem


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_a_mutated_checkpoint_is_one_error_or_loads(tmp_path, seed):
    rng = random.Random(seed)
    format = rng.choice(sorted(FORMATS))
    check_mutated(head_of(tmp_path, format, **OF_FORMAT.get(format, {})), rng)


def test_a_target_is_no_draft(tmp_path):
    write_target(tmp_path, TARGET)
    assert inspect_checkpoint(tmp_path).report.role == "target"
