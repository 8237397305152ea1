"""A draft on the ranks of its target: cut as the target is, or whole on each."""

import pytest
import torch

from tests.weights.formats import FORMATS
from tests.weights.ranks import expected_part, load_drafts, load_targets
from tests.weights.tiny import (
    draft_tensors,
    eagle1_config,
    eagle3_config,
    tiny_target,
    write_target,
)
from weights import load_eagle, load_target
from weights.shard import WHOLE

FULL = {"has_d2t": False, "draft_vocab_size": 96}
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
EAGLE3 = {
    "d2t": {},
    "a group of heads on several ranks": {"num_heads": 8, "num_kv_heads": 2},
    "biases": BIASES,
    "two layers": {"num_layers": 2, "qk_norm": True},
    "a borrowed head": {"has_own_head": False, **FULL},
    "an embedding of its own": {"has_own_embedding": True},
    "another width": {"hidden_size": 24, "has_own_embedding": True},
}
EAGLE1 = {
    "plain": {},
    "biases": {"fc_bias": False, "qkv_bias": True},
    "norms": {"has_embed_norm": True, "has_input_layernorm": True, "has_final_norm": True}
    | {"recycled": "post_norm"},
    "a head of its own": {"has_own_head": True},
}
CASES = [
    pytest.param(make, changes, id=f"{kind}: {name}")
    for kind, make, cases in (
        ("eagle-3", eagle3_config, EAGLE3),
        ("eagle-1", eagle1_config, EAGLE1),
    )
    for name, changes in cases.items()
]


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "tied"])
def target(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    write_target(directory, tiny_target("llama", has_tied_head=request.param))
    return load_target(directory, progress=False)


def write(directory, target, config, seed=1):
    """Write the draft in the first format that can express it."""
    tensors = draft_tensors(config, seed)
    format = next(each for each in FORMATS.values() if each.can_express(config, target))
    format.write(directory, config, tensors, target)


def targets(target, size):
    return load_targets(target.report.directory, size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("make", "changes"), CASES)
def test_ranks_hold_their_parts_bit_for_bit(tmp_path, target, make, changes, size):
    write(tmp_path, target, make(target, **changes))
    whole = load_eagle(tmp_path, target, progress=False)
    for found in load_drafts(tmp_path, targets(target, size)):
        expected = expected_part(whole, found.shard)
        assert found.config == whole.config
        assert found.tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found.tensors[key], tensor), (found.shard, key)


@pytest.mark.parametrize(("make", "changes"), CASES)
def test_a_draft_that_is_whole_has_copies_of_what_it_borrows(tmp_path, target, make, changes):
    write(tmp_path, target, make(target, **changes))
    whole = load_eagle(tmp_path, target, progress=False)
    embedding = target.tensors["embed_tokens.weight"]
    borrowed = {
        "embed_tokens.weight": embedding,
        "lm_head.weight": target.tensors.get("lm_head.weight", embedding),
    }
    for found in load_drafts(tmp_path, targets(target, 2), WHOLE):
        assert found.config == found.local == whole.config
        assert found.tensors.keys() == (borrowed | whole.tensors).keys()
        for key, tensor in (borrowed | whole.tensors).items():
            assert torch.equal(found.tensors[key], tensor), key


@pytest.mark.parametrize("shard", [None, WHOLE], ids=["cut", "whole"])
@pytest.mark.parametrize("row", [None, 5, 90])  # which differs, on the first rank or the second
def test_ranks_agree_on_what_is_a_copy(tmp_path, target, row, shard):
    """On one rank's rows alone a head may equal the target's, and then another factor counts."""
    config = eagle1_config(target, has_own_head=True)
    head = target.tensors.get("lm_head.weight", target.tensors["embed_tokens.weight"]).clone()
    if row is not None:
        head[row] += 1
    tensors = draft_tensors(config) | {"lm_head.weight": head}
    FORMATS["eagle-1-vllm"].write(tmp_path, config, tensors, target)
    whole = load_eagle(tmp_path, target, progress=False)
    assert whole.config.has_own_head == (row is not None)
    drafts = load_drafts(tmp_path, targets(target, 2), shard)
    assert [each.config for each in drafts] == [whole.config] * 2
    if shard is WHOLE:
        assert all(torch.equal(each.tensors["lm_head.weight"], head) for each in drafts)


def test_a_rank_of_several_asks_the_others(tmp_path, target):
    write(tmp_path, target, eagle3_config(target))
    with pytest.raises(AssertionError, match="asks no other"):
        load_eagle(tmp_path, targets(target, 2)[0], progress=False)
