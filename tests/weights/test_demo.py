"""The bundled pair loads, and says what the pair's README says."""

import pytest
import torch

from weights import demo_directory, demo_prompts, load_eagle, load_target


@pytest.fixture(scope="module")
def target():
    return load_target(demo_directory("target"), progress=False)


def test_the_target(target):
    config = target.config
    assert (config.model_type, config.num_layers, config.vocab_size, config.has_tied_head) == (
        "llama",
        8,
        4096,
        True,
    )
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (1,)
    assert sum(tensor.numel() for tensor in target.tensors.values()) == 7344384


def test_the_eagle3_draft(target):
    draft = load_eagle(demo_directory("eagle3"), target, progress=False)
    config = draft.config
    assert (config.format, config.entry, config.aux_boundaries) == ("eagle-3", "qkv", (2, 4, 5))
    assert (config.draft_vocab_size, config.has_d2t, config.has_own_head) == (1024, True, True)
    assert not config.has_own_embedding
    assert int(draft.tensors["d2t"].max()) < 4096


def test_the_eagle1_draft_borrows_embedding_and_a_tied_head(target):
    draft = load_eagle(demo_directory("eagle1"), target, progress=False)
    config = draft.config
    assert (config.format, config.entry, config.fc_bias, config.recycled) == (
        "eagle-1",
        "fc",
        True,
        "pre_norm",
    )
    flags = (
        config.has_own_embedding,
        config.has_own_head,
        config.has_input_layernorm,
        config.has_final_norm,
    )
    assert not any(flags)
    assert draft.tensors["fc.bias"].dtype == torch.bfloat16


def test_the_dspark_draft_borrows_embedding_and_head(target):
    config = load_eagle(demo_directory("dspark"), target, progress=False).config
    assert (config.format, config.aux_boundaries) == ("specforge-dspark", (1, 3, 5, 7, 8))
    assert (config.num_layers, config.block_size, config.markov) == (3, 8, "vanilla")
    flags = config.anchor_proposes, config.has_own_embedding, config.has_own_head
    assert flags == (True, False, False)
    assert (demo_directory("dspark") / "model.safetensors").stat().st_size < 5_000_000


def test_the_pair_with_experts():
    target = load_target(demo_directory("experts/target"), progress=False)
    config = target.config
    assert (config.model_type, config.num_layers, config.has_tied_head) == ("qwen3_moe", 8, True)
    for kind in config.layers:
        experts = kind.experts
        assert (experts.num, experts.per_token, experts.renormalise) == (16, 4, True)
    draft = load_eagle(demo_directory("experts/eagle3"), target, progress=False).config
    assert (draft.format, draft.entry, draft.aux_boundaries) == ("eagle-3", "qkv", (2, 4, 5))
    assert (draft.draft_vocab_size, draft.has_own_head, draft.has_own_embedding) == (
        1024,
        True,
        False,
    )
    files = (demo_directory("experts/target").parent).rglob("*.safetensors")
    assert sum(file.stat().st_size for file in files) < 8_000_000


def test_the_prompts():
    prompts = demo_prompts()
    assert len(prompts["prompts"]) == 48
    assert [len(tokens) for tokens in prompts["greedy_float32"]] == [160] * 24


def test_a_part_that_does_not_exist_is_refused():
    parts = "target, eagle3, eagle1, dspark, "
    with pytest.raises(ValueError, match=f"demo part 'eagle9': one of {parts}"):
        demo_directory("eagle9")
