"""Models whose weights are cut compute on each rank what one process computes with all weights."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.specdec.parallel.passes import Pair, passes_of
from tests.specdec.tiny_pair import changed, on_disk, random_draft
from tests.weights.formats import FORMATS
from tests.weights.gpt_oss import write_both_forms
from tests.weights.published import save
from tests.weights.tiny import eagle1_config, eagle3_config, tiny_target
from weights.shard import WHOLE

# Whether products with a whole weight add the same parts as ranks do, as a tree. The sizes below
# allow it: K of o_proj and down_proj is a multiple of 64 for each of four ranks.
HAS_EQUAL_BITS = True
# how far sums in another order may be apart, beside a tensor's deviation
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 0.2}
CUT = {"logits": 1, "cache": 2}  # the dimension of ids, of heads
SIZES = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "intermediate_size": 256}
OF_FILES = {
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4},
    **{"intermediate_size": 256, "head_dim": 32},
}
COPIED = {"num_kv_heads": 1}
TARGETS = {
    "llama, biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qwen3, a copied kv head": COPIED,
    "granite": {},
}
EXPERTS = ["qwen3_moe, a dense layer", "granitemoe"]
GPT_OSS = "gpt_oss, MXFP4"  # with windows, sinks and all biases
DRAFTS = {
    "eagle-3": (eagle3_config, {}),
    "eagle-3, two layers": (eagle3_config, {"num_layers": 2, "recycled": "post_norm"}),
    "eagle-1": (eagle1_config, {}),
}
MODELS = [*TARGETS, *EXPERTS, GPT_OSS]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """pair(name, draft): a target, and a draft for it or None."""

    @cache
    def build(name, draft=None, is_whole=False):
        directory = tmp_path_factory.mktemp("pair")
        if name in EXPERTS:
            mlp_only = {"mlp_only_layers": [2]} if name.startswith("qwen3") else {}
            save(name, directory / "target", **OF_FILES, **mlp_only)
            return Pair(directory / "target")
        if name == GPT_OSS:
            save("gpt_oss", directory, **OF_FILES, num_local_experts=8)
            write_both_forms(directory, directory / "target", directory / "plain")
            return Pair(directory / "target")
        config = tiny_target(name.split(",")[0]).config
        keys = {"mlp_bias": True} if "biases" in name else {}
        config = changed(config, num_layers=8, **(SIZES | TARGETS[name]))
        target = on_disk(directory / "target", config, seed=2, **keys).loaded
        if draft is None:
            return Pair(directory / "target")
        make, changes = DRAFTS[draft]
        eagle = random_draft(make(target, **SIZES, **changes))
        format = next(each for each in FORMATS.values() if each.can_express(eagle.config, target))
        format.write(directory / "draft", eagle.config, eagle.tensors, target)
        return Pair(directory / "target", directory / "draft", is_whole)

    return build


@pytest.fixture(scope="module")
def alone():
    """alone(pair): what one process computes with all weights."""
    return cache(lambda pair: passes_of(WHOLE, "", pair))


def check(ranks, pair, expected, **how):
    """All ranks have the same, but for what is cut: together that is what one process has."""
    results = ranks.run(passes_of, pair, *how.values())
    for key, whole in expected.items():
        parts = [result[key] for result in results]
        axis = next((axis for word, axis in CUT.items() if word in key), None)
        if axis is None or ("draft" in key and pair.is_draft_whole):
            assert all(torch.equal(part, parts[0]) for part in parts), key
            found = parts[0]
        else:
            found = torch.cat(parts, axis)
        assert found.isfinite().all(), key
        if HAS_EQUAL_BITS:
            assert torch.equal(found, whole), key
        else:
            most = CLOSE[pair.dtype] * whole.std()
            assert (found - whole).abs().max() < most, key


@pytest.mark.parametrize("name", MODELS)
def test_a_target_on_ranks_computes_what_one_process_computes(ranks, pair, alone, name):
    check(ranks, pair(name), alone(pair(name)))


@pytest.mark.parametrize("name", ["qwen3, a copied kv head", "granitemoe"])
def test_parts_of_products_are_not_rounded(two_ranks, pair, alone, name):
    of_halves = replace(pair(name), dtype=torch.bfloat16)
    check(two_ranks, of_halves, alone(of_halves))


@pytest.mark.parametrize(
    "name", ["llama, biases", pytest.param("qwen3_moe, a dense layer", marks=pytest.mark.slow)]
)
def test_graphs_repeat_the_exchange(two_ranks, pair, alone, name):
    """On the tape, replayed with other rows before."""
    check(two_ranks, pair(name), alone(pair(name)), on_tape=True)


@pytest.mark.parametrize(
    "draft, is_whole", [*((draft, False) for draft in DRAFTS), ("eagle-3", True)]
)
def test_a_draft_on_ranks_computes_what_one_process_computes(ranks, pair, alone, draft, is_whole):
    """Cut as the target is, or whole on every rank."""
    of_both = pair("llama, biases", draft, is_whole)
    check(ranks, of_both, alone(of_both))
