"""Drafts from files, against the naive draft: every flag, tap convention and format.

Tokens stay right whatever a draft computes, so here its logits are compared: three chained levels
after a prompt, and three after the next round.
"""

import dataclasses
import json

import pytest
import torch

from tests.specdec.tiny_pair import (
    PROMPT,
    changed,
    engine_chains,
    naive_chain,
    on_disk,
    random_draft,
)
from tests.weights.formats import FORMATS
from tests.weights.tiny import eagle1_config, eagle3_config, tiny_target
from weights import CheckpointError, RopeConfig, load_eagle

LLAMA3 = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=16)
YARN = RopeConfig(
    theta=5e5, kind="yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=4.0
)
LINEAR = RopeConfig(theta=1e4, kind="linear", factor=4.0)
FULL = {"has_d2t": False, "draft_vocab_size": 96}
LAYERNORMS = {
    "has_embed_norm": True,
    "has_input_layernorm": True,
    "has_final_norm": True,
    "recycled": "post_norm",
}
NO_TAPS = {"aux_boundaries": (), "has_fc": False}
MTP = {"has_feature_norm": True, "fc_bias": False, "head_dim": 16, "max_position_embeddings": 256}

# what differs from a reference draft of its kind, by name
EAGLE3 = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"has_fc_norm": True},
    "post_norm": {"recycled": "post_norm"},
    "eagle 3.1": {"has_fc_norm": True, "recycled": "post_norm"},
    "speculators": {"norm_before_residual": True, "norm_before_fc": True, "recycled": "post_norm"},
    "qk_norm": {"qk_norm": True},
    "qkv_bias": {"qkv_bias": True},
    "all biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "no final norm": {"has_final_norm": False},
    "no input_layernorm": {"has_input_layernorm": False},
    "2 layers": {"num_layers": 2},
    "3 layers": {"num_layers": 3, "norm_before_residual": True, "has_fc_norm": True},
    "1 tap": {"aux_boundaries": (5,)},
    "2 taps": {"aux_boundaries": (1, 7)},
    "3 taps": {"aux_boundaries": (2, 4, 6)},
    "4 taps": {"aux_boundaries": (1, 2, 4, 7)},
    "5 taps": {"aux_boundaries": (2, 3, 5, 6, 8), "has_fc_norm": True},
    "taps of the embedding and the end": {"aux_boundaries": (0, 4, 8)},
    "taps in another order": {"aux_boundaries": (6, 2, 4)},
    "no taps": NO_TAPS,
    "no taps, nothing own": NO_TAPS | FULL | {"has_own_head": False},
    "deepspec": {"aux_boundaries": (2, 3, 5, 6, 7), "qk_norm": True, **FULL},
    "full vocabulary": FULL,
    "borrowed head": FULL | {"has_own_head": False},
    "own embedding": {"has_own_embedding": True},
    "narrower than its target": {"hidden_size": 24, "has_own_embedding": True, "has_fc_norm": True},
    "narrower, norm_before_fc": {
        "hidden_size": 24,
        "has_own_embedding": True,
        "norm_before_fc": True,
        **FULL,
    },
    "head_dim": {"head_dim": 16},
    "window": {"window": 5},
    "odd sizes": {
        "hidden_size": 28,
        "intermediate_size": 37,
        "head_dim": 6,
        "has_own_embedding": True,
    },
    "rope theta": {"rope": RopeConfig(theta=100.0)},
    "rope linear": {"rope": LINEAR},
    "rope llama3": {"rope": LLAMA3},
    "rope yarn": {"rope": YARN},
}
EAGLE1 = {
    "plain": {},
    "no fc_bias": {"fc_bias": False},
    "qkv_bias": {"qkv_bias": True},
    "2 layers": {"num_layers": 2},
    "own embedding": {"has_own_embedding": True},
    "own head": {"has_own_head": True},
    "layernorms": LAYERNORMS,
    "layernorms, no fc_bias": LAYERNORMS | {"fc_bias": False},
    "mtp": LAYERNORMS | MTP,
    "rope theta": {"rope": RopeConfig(theta=5e5)},
    "rope llama3": {"rope": LLAMA3},
}
KINDS = {"eagle3": (eagle3_config, EAGLE3), "eagle1": (eagle1_config, EAGLE1)}

# what is flipped in a draft of two layers with a final norm
FLIPS = {
    "recycled": {"recycled": "post_norm"},
    "num_layers": {"num_layers": 1},
    "has_final_norm": {"has_final_norm": False},
    "rope theta": {"rope": RopeConfig(theta=100.0)},
    "rope linear": {"rope": LINEAR},
    "rope llama3": {"rope": LLAMA3},
    "rope yarn": {"rope": YARN},
    "rms_norm_eps": {"rms_norm_eps": 0.3},
    "window": {"window": 5},
    **{
        name: {name: True}
        for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "has_own_embedding")
    },
}
FLIPS3 = FLIPS | {
    "taps one too low": {"aux_boundaries": (1, 3, 4)},
    "taps one too high": {"aux_boundaries": (3, 5, 6)},
    "one tap off by one": {"aux_boundaries": (2, 4, 6)},
    "taps reversed": {"aux_boundaries": (5, 4, 2)},
    **{
        name: {name: True}
        for name in ("norm_before_residual", "norm_before_fc", "has_fc_norm", "fc_bias")
    },
    **{name: {name: False} for name in ("has_input_layernorm", "has_hidden_norm", "has_d2t")},
}
FLIPS1 = FLIPS | {
    "fc_bias": {"fc_bias": False},
    **{name: {name: True} for name in ("has_embed_norm", "has_input_layernorm", "has_own_head")},
    "has_feature_norm": {"has_feature_norm": True},
}

# keys of config.json that no tensor contradicts, so that only the logits tell
SILENT = [
    ("eagle-3-vllm", {"norm_before_residual": True}),
    ("eagle-3-vllm", {"norm_output": True}),
    ("eagle-3-vllm", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
    ("eagle-3-vllm", {"rope_theta": 5e5}),
    ("eagle-3", {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}),
    ("specforge", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}),
    ("speculators-eagle3", {"norm_before_residual": True}),
    ("speculators-eagle3", {"norm_output": True}),
    ("speculators-eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
    ("modelopt", {"eagle_config": {"return_hidden_post_norm": True, "use_aux_hidden_state": True}}),
    ("angelslim", {"norm_output": True}),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("target"), tiny_target().config)


@pytest.fixture(scope="module")
def tied_target(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("tied"), tiny_target("qwen3", has_tied_head=True).config)


@pytest.mark.parametrize(
    "kind, name", [(kind, name) for kind, (_, rows) in KINDS.items() for name in rows]
)
def test_every_format_of_a_draft_computes_what_the_naive_draft_does(target, tmp_path, kind, name):
    make_config, rows = KINDS[kind]
    check_all_formats(target, make_config(target.loaded, **rows[name]), tmp_path)


@pytest.mark.parametrize(
    "kind, name", [("eagle3", "borrowed head"), ("eagle3", "plain"), ("eagle1", "plain")]
)
def test_a_draft_borrows_from_a_tied_target(tied_target, tmp_path, kind, name):
    make_config, rows = KINDS[kind]
    check_all_formats(tied_target, make_config(tied_target.loaded, **rows[name]), tmp_path)


def check_all_formats(target, config, directory):
    draft = random_draft(config)
    chains = engine_chains(target, draft)
    for chain in chains:
        assert distance(chain, naive_chain(target.reference, draft, chain.tokens)) < 1e-5
    able = [name for name, format in FORMATS.items() if format.can_express(config, target.loaded)]
    assert able
    for name in able:
        FORMATS[name].write(directory / name, config, draft.tensors, target.loaded)
        loaded = load_eagle(directory / name, target.loaded, progress=False)
        assert dataclasses.replace(loaded.config, format="any") == config, name
        for chain, read_chain in zip(chains, engine_chains(target, loaded), strict=True):
            assert read_chain.tokens == chain.tokens, name
            assert torch.equal(read_chain.logits_KW, chain.logits_KW), name


@pytest.mark.parametrize(
    "make_config, flip",
    [pytest.param(eagle3_config, FLIPS3[name], id=f"eagle3-{name}") for name in FLIPS3]
    + [pytest.param(eagle1_config, FLIPS1[name], id=f"eagle1-{name}") for name in FLIPS1],
)
def test_a_flag_flipped_moves_the_logits_and_the_naive_draft_with_them(target, make_config, flip):
    config = make_config(target.loaded, num_layers=2, has_final_norm=True)
    flipped = random_draft(changed(config, **flip))
    [chain, _] = engine_chains(target, flipped)
    assert distance(chain, naive_chain(target.reference, flipped, chain.tokens)) < 1e-5
    assert distance(chain, naive_chain(target.reference, random_draft(config), chain.tokens)) > 1e-3


@pytest.mark.parametrize(
    "format, keys", SILENT, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_a_key_flipped_in_config_json_has_an_effect(target, tmp_path, format, keys):
    draft = random_draft(eagle3_config(target.loaded))
    FORMATS[format].write(tmp_path, draft.config, draft.tensors, target.loaded)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    loaded = load_eagle(tmp_path, target.loaded, progress=False)
    [chain, _] = engine_chains(target, loaded)
    assert distance(chain, naive_chain(target.reference, loaded, chain.tokens)) < 1e-5
    assert distance(chain, naive_chain(target.reference, draft, chain.tokens)) > 1e-3


@pytest.mark.parametrize(
    "ids, boundaries", [([1, 3, 4], (2, 4, 5)), ([4, 6, 8], (4, 6, 8)), ([1, 8], (1, 8))]
)
def test_ids_of_either_convention_read_the_same_streams(target, tmp_path, ids, boundaries):
    draft = random_draft(eagle3_config(target.loaded, aux_boundaries=boundaries))
    FORMATS["modelopt"].write(tmp_path, draft.config, draft.tensors, target.loaded)
    assert (
        json.loads((tmp_path / "config.json").read_text())["eagle_config"][
            "eagle_aux_hidden_state_layer_ids"
        ]
        == ids
    )
    [chain, _] = engine_chains(target, load_eagle(tmp_path, target.loaded, progress=False))
    assert distance(chain, naive_chain(target.reference, draft, chain.tokens)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [(1,) * len(PROMPT), (4, 7), (10, 1)])
def test_chunks_of_a_prompt_do_not_move_a_bit_of_the_chain(target, kind, chunks):
    draft = random_draft(KINDS[kind][0](target.loaded, num_layers=2))
    whole = engine_chains(target, draft)
    parts = engine_chains(target, draft, chunks)
    assert all(torch.equal(a.logits_KW, b.logits_KW) for a, b in zip(whole, parts, strict=True))


def test_every_format_is_among_those_compared(target):
    configs = [
        make_config(target.loaded, **row)
        for make_config, rows in KINDS.values()
        for row in rows.values()
    ]
    seen = {
        name
        for name, format in FORMATS.items()
        for c in configs
        if format.can_express(c, target.loaded)
    }
    assert seen == FORMATS.keys()


@pytest.mark.parametrize("name, width", [("input_norm.weight", 32), ("fc_norm.0.weight", 32)])
def test_an_eagle1_head_with_a_norm_before_fc_is_refused(target, tmp_path, name, width):
    # the formulas do not say whether recycled states would pass it
    draft = random_draft(eagle1_config(target.loaded))
    FORMATS["eagle-1"].write(
        tmp_path, draft.config, draft.tensors | {name: torch.ones(width)}, target.loaded
    )
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_eagle(tmp_path, target.loaded, progress=False)


def distance(chain, logits_KW):
    return (chain.logits_KW - logits_KW).abs().max().item()
