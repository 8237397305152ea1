"""Models of a rank's weights: what the ranks compute adds up to the whole model.

The formulas are tests/reference.py's, in float64, and run with the heads, columns, experts and ids
of one rank; the exchange between ranks is a sum or a concatenation by hand.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specdec.models.build import build_draft, build_target
from specdec.parallel.exchange import Exchange
from tests.reference import Reference, attention, experts, mlp, rms_norm
from tests.specdec.tiny_pair import on_disk
from tests.weights.formats import FORMATS
from tests.weights.published import save
from tests.weights.ranks import load_drafts, load_targets
from tests.weights.tiny import draft_tensors, eagle1_config, eagle3_config, tiny_target
from weights import LoadedTarget
from weights.arrange import arrange
from weights.shapes import target_shapes
from weights.shard import WHOLE

CPU = torch.device("cpu")
TOKENS = [5, 90, 17, 41, 41, 63, 2, 8]


class Rank:
    """A rank's weights in float64, under the names of files."""

    def __init__(self, target: LoadedTarget) -> None:
        local = target.local
        self.kinds = local.layers
        places = arrange(target_shapes(local)).pieces(target.tensors)
        self.weights = {name: tensor.double() for name, tensor in places.items()}
        self.weights.setdefault("lm_head.weight", self.weights["embed_tokens.weight"])
        self.ids = target.shard.ids_of(target.config.vocab_size)

    def embed(self, tokens: list[int]) -> Tensor:
        """Look up the rows of this rank's ids; zeros for others."""
        table = self.weights["embed_tokens.weight"]
        rows = [table[t - self.ids.start] if t in self.ids else 0 * table[0] for t in tokens]
        return torch.stack(rows)

    def attention(self, i: int, x_TD: Tensor) -> Tensor:
        # a bias of all is added once
        kind = dataclasses.replace(self.kinds[i], o_bias=False)
        return attention(kind, self.weights, f"layers.{i}.self_attn", x_TD)

    def mlp(self, i: int, x_TD: Tensor) -> Tensor:
        kind, name = self.kinds[i], f"layers.{i}.mlp"
        if kind.experts is None:
            return mlp(dataclasses.replace(kind, mlp_bias=False), self.weights, name, x_TD)
        held = kind.experts.held
        chosen = SimpleNamespace(
            num_experts_per_tok=kind.experts.per_token,
            norm_topk_prob=kind.experts.renormalise,
            mlp_bias=False,
        )
        # those of others give nothing
        nothing = {
            f"{name}.experts.{e}.{role}_proj.weight": 0
            * self.weights[f"{name}.experts.{held.start}.{role}_proj.weight"]
            for e in range(kind.experts.num)
            if e not in held
            for role in ("gate", "up", "down")
        }
        return experts(chosen, self.weights | nothing, name, x_TD)


def logits_by_hand(targets: list[LoadedTarget], tokens: list[int]) -> Tensor:
    """Run a target that is cut, adding up what its ranks compute. Returns [T, V] float64."""
    ranks = [Rank(target) for target in targets]
    shared = ranks[0].weights
    config = targets[0].config
    eps = config.layers[0].rms_norm_eps

    def bias(name: str) -> Tensor:
        return shared.get(f"{name}.bias", torch.zeros(1, dtype=torch.float64))

    stream_TD = sum(rank.embed(tokens) for rank in ranks)
    for i in range(config.num_layers):
        x = rms_norm(stream_TD, shared[f"layers.{i}.input_layernorm.weight"], eps)
        stream_TD = stream_TD + sum(rank.attention(i, x) for rank in ranks)
        stream_TD = stream_TD + bias(f"layers.{i}.self_attn.o_proj")
        x = rms_norm(stream_TD, shared[f"layers.{i}.post_attention_layernorm.weight"], eps)
        stream_TD = stream_TD + sum(rank.mlp(i, x) for rank in ranks)
        stream_TD = stream_TD + bias(f"layers.{i}.mlp.down_proj")
    hidden_TD = rms_norm(stream_TD, shared["norm.weight"], eps)
    return torch.cat([hidden_TD @ rank.weights["lm_head.weight"].T for rank in ranks], dim=1)


def logits_of_reference(directory, tokens: list[int]) -> Tensor:
    reference = Reference(directory)
    reference.weights = {name: tensor.double() for name, tensor in reference.weights.items()}
    return reference.forward(tokens).logits_TV


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_ranks_add_up_to_the_whole_target(tmp_path, model_type, is_tied, size):
    on_disk(tmp_path, tiny_target(model_type, has_tied_head=is_tied).config)
    found = logits_by_hand(load_targets(tmp_path, size), TOKENS)
    expected = logits_of_reference(tmp_path, TOKENS)
    assert expected.std() > 0.1
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["qwen3_moe, a dense layer", "qwen3_moe, every second"])
def test_ranks_with_whole_experts_add_up_to_the_whole_target(tmp_path, name, size):
    save(name, tmp_path)
    found = logits_by_hand(load_targets(tmp_path, size), TOKENS)
    assert torch.allclose(found, logits_of_reference(tmp_path, TOKENS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [eagle1_config, eagle3_config])
@pytest.mark.parametrize("shard", [None, WHOLE], ids=["cut", "whole"])
def test_models_are_built_of_a_ranks_weights(tmp_path, make, shard):
    """The MLPs of both ranks add up to the whole one, in float32."""
    pair = on_disk(tmp_path / "target", tiny_target("qwen3").config)
    draft = make(pair.loaded)
    tensors = draft_tensors(draft)
    FORMATS["eagle-1" if make is eagle1_config else "eagle-3"].write(
        tmp_path / "draft", draft, tensors, pair.loaded
    )
    targets = load_targets(tmp_path / "target", 2)
    exchanges = [Exchange(each.shard, "no group", 64) for each in targets]
    models = [
        build_target(target, (2, 4, 5), 64, CPU, exchange)
        for target, exchange in zip(targets, exchanges, strict=True)
    ]
    x_TD = torch.randn(5, 32)
    whole = build_target(pair.loaded, (2, 4, 5), 64, CPU).layers[3].mlp(x_TD).finish(torch.float32)
    parts = [model.layers[3].mlp(x_TD).finish(torch.float32) for model in models]
    assert torch.allclose(sum(parts), whole, atol=1e-5)
    drafts = load_drafts(tmp_path / "draft", targets, shard)
    for eagle, model, exchange in zip(drafts, models, exchanges, strict=True):
        built = build_draft(eagle, model, 64, CPU, exchange)
        rows = [len(each.weight) for each in (built.embed_tokens, built.lm_head)]
        of_whole = [draft.vocab_size, draft.draft_vocab_size]
        assert rows == (of_whole if shard is WHOLE else [each // 2 for each in of_whole])
        assert built.layers[0].self_attn.qkv_proj.weight.shape[0] == (64 if shard is WHOLE else 32)
