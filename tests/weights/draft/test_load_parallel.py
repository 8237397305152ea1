"""P-EAGLE drafts from files: the same binding in both formats, and refusals by name."""

import dataclasses
import random

import pytest

from specdec.cli.verify import read_as
from tests.weights.draft.head import Head, check_formats, check_mutated
from tests.weights.formats import PARALLEL
from tests.weights.tiny import eagle3_config, tiny_target
from weights import inspect_checkpoint
from weights.ranks import check_draft_ranks

TARGET = tiny_target()
FULL = {"has_d2t": False, "draft_vocab_size": 96}
# what is set, and how many formats can express it
FEATURES = [
    ({}, 2),
    ({"num_layers": 1, "norm_before_residual": True}, 2),
    ({"norm_before_fc": True, "aux_boundaries": (2, 3, 5, 6, 7)}, 2),
    ({"has_fc_norm": True, "trained_drafts": 8}, 1),
    ({"qk_norm": True, "window": 16}, 2),
    ({"has_own_head": False, **FULL}, 2),
    ({"hidden_size": 24, "has_own_embedding": True, "norm_before_fc": True}, 2),
]


def config_of(**changes):
    return eagle3_config(TARGET, **{"num_layers": 2, "mask_token_id": 93} | changes)


@pytest.mark.parametrize("features, num_formats", FEATURES, ids=str)
def test_a_draft_binds_alike_in_both_formats(tmp_path, features, num_formats):
    found = check_formats(tmp_path, config_of(**features), TARGET, PARALLEL)
    assert found == dict.fromkeys([*PARALLEL][:num_formats], "peagle")


def head_of(directory, format="p-eagle", **changes):
    return Head(directory, PARALLEL[format], config_of(**changes), TARGET)


@pytest.mark.parametrize("key", ["ptd_token_id", "pard_token", "mask_token_id"])
def test_the_mask_token_has_three_names(tmp_path, key):
    head = head_of(tmp_path)
    head.keys[key] = head.keys.pop("pard_token")
    loaded = head.load()
    assert (loaded.config.format, loaded.config.mask_token_id) == ("p-eagle", 93)
    assert f"config.json: {key}" in str(loaded.report)


@pytest.mark.parametrize("format", PARALLEL)
def test_an_absent_norm_before_residual_means_none_and_ids_are_boundaries(tmp_path, format):
    head = head_of(tmp_path, format)
    assert "norm_before_residual" not in head.keys
    head.keys["eagle_aux_hidden_state_layer_ids"] = [1, 3, 7]
    config = head.load().config
    assert (config.norm_before_residual, config.aux_boundaries) == (False, (1, 3, 7))
    del head.keys["eagle_aux_hidden_state_layer_ids"]
    assert head.load().config.aux_boundaries == (2, 4, 5)


def test_taps_are_boundaries_for_gpt_oss_too(tmp_path):
    config = dataclasses.replace(TARGET.config, model_type="gpt_oss")
    head = head_of(tmp_path)
    head.keys["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    loaded = head.load(dataclasses.replace(TARGET, config=config))
    assert (loaded.config.format, loaded.config.aux_boundaries) == ("p-eagle", (1, 3, 4))
    assert "as all heads for gpt-oss have them" in read_as(TARGET.report, loaded.report)["taps"]


def test_what_a_head_would_recycle_is_ignored(tmp_path):
    head = head_of(tmp_path, "speculators-peagle")
    head.keys["norm_output"] = True
    loaded = head.load()
    assert loaded.config.recycled == "pre_norm"
    assert any("recycles nothing" in note for note in loaded.report.notes)


# what changes: config keys (None: it goes), tensors, and words of the refusal
REFUSED = {
    "no mask_hidden": ({}, {"mask_hidden": None}, "missing mask_hidden [1, 1, 96]"),
    "a narrow mask": ({}, {"mask_hidden": (1, 1, 32)}, "mask_hidden is [1, 1, 32], [1, 1, 96]"),
    "no token": ({"pard_token": None}, {}, "missing mask_token_id"),
    "outside": ({"pard_token": 96}, {}, "pard_token is 96, but the embedding has rows 0 to 95"),
    "below": ({"pard_token": -1}, {}, "pard_token is -1"),
    "EAGLE-1": (
        {},
        {"layers.0.hidden_norm.weight": None, "layers.0.self_attn.q_proj.weight": (32, 32)},
        "a P-EAGLE draft without hidden_norm is not supported",
    ),
    "depths": ({"num_depths": 0}, {}, "num_depths is 0"),
    "heads": ({}, {"parallel_draft_heads.0.lm_head.weight": (4, 4)}, "EagleMedusa"),
}


@pytest.mark.parametrize("attack", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path, attack):
    head = head_of(tmp_path)
    keys, tensors, words = REFUSED[attack]
    head.keys = {k: v for k, v in (head.keys | keys).items() if v is not None}
    head.replace(tensors)
    assert words in head.refusal()


@pytest.mark.parametrize("format", PARALLEL)
def test_a_draft_is_inspected_with_and_without_its_target(tmp_path, format):
    head = head_of(tmp_path, format)
    for target in (None, TARGET.config):
        found = inspect_checkpoint(head.directory, target)
        assert (found.problems, found.report.role) == ((), "draft")
        assert found.report.format == format
        assert {"mask_token_id", "trained_drafts"} <= {row.field for row in found.report.fields}


def test_such_a_draft_is_not_cut():
    with pytest.raises(ValueError, match=r"=2: a peagle draft is not cut; .*_size=1 keeps"):
        check_draft_ranks(config_of(), 2)


MORE = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 90)]


@pytest.mark.parametrize("seed", [*range(4), *MORE])
def test_a_mutated_checkpoint_is_one_error_or_loads(tmp_path, seed):
    rng = random.Random(seed)
    format = rng.choice(sorted(PARALLEL))
    check_mutated(head_of(tmp_path, format, norm_before_fc=seed % 2 == 0), rng)
