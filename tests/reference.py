"""Plain greedy decoding of a Llama-family target in float32: what exactness tests compare with.

The formulas of Llama (arXiv 2302.13971) with what Mistral, Qwen2 and Qwen3 add: biases, per-head
norms, head_dim, a tied head, a window, scaled rope, Qwen3-MoE's experts, weights of FP8 with scales
of rows or blocks; read from config.json and from which tensors there are. Imports nothing of ours.
A layer has the field names of weights/config.py, for tests/naive_eagle.py to use these formulas
with a config of either origin.

T rows, S keys, D hidden, H query heads, G kv heads, C channels per head, V vocabulary, L layers.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

Weights = dict[str, Tensor]
Cache = dict[str, tuple[Tensor, Tensor]]  # keys and values [S, G, C] by attention name


class Outputs(NamedTuple):
    logits_TV: Tensor
    hidden_TD: Tensor  # behind the final norm
    boundaries: list[
        Tensor
    ]  # L + 1 of [T, D]: the stream entering layer i; boundary L is before the final norm


class Reference:
    """A target read from a directory of safetensors."""

    def __init__(self, directory: str | Path) -> None:
        config = json.loads((Path(directory) / "config.json").read_text())
        self.weights = {
            name.removeprefix("model."): tensor for name, tensor in read_weights(directory).items()
        }
        self.weights.setdefault("lm_head.weight", self.weights["embed_tokens.weight"])
        self.layer = read_layer(config, self.weights)
        self.num_layers = config["num_hidden_layers"]

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The next num_tokens tokens, EOS or not."""
        tokens, cache = list(prompt), Cache()
        while len(tokens) < len(prompt) + num_tokens:
            num_cached = len(tokens) - 1 if cache else 0
            tokens.append(int(self.forward(tokens[num_cached:], cache).logits_TV[-1].argmax()))
        return tokens[len(prompt) :]

    @torch.no_grad()
    def forward(self, tokens: list[int], cache: Cache | None = None) -> Outputs:
        """All rows of `tokens`, which follow those that `cache` has seen."""
        stream_TD = self.weights["embed_tokens.weight"][tokens]
        boundaries = [stream_TD]
        for i in range(self.num_layers):
            name = f"layers.{i}"
            x = self.norm(f"{name}.input_layernorm", stream_TD)
            stream_TD = stream_TD + attention(
                self.layer, self.weights, f"{name}.self_attn", x, cache
            )
            x = self.norm(f"{name}.post_attention_layernorm", stream_TD)
            stream_TD = stream_TD + mlp(self.layer, self.weights, f"{name}.mlp", x)
            boundaries.append(stream_TD)
        hidden_TD = self.norm("norm", stream_TD)
        return Outputs(linear(self.weights, "lm_head", hidden_TD), hidden_TD, boundaries)

    def norm(self, name: str, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weights[f"{name}.weight"], self.layer.rms_norm_eps)


def attention(
    layer: Any, weights: Weights, name: str, x_TD: Tensor, cache: Cache | None = None
) -> Tensor:
    """Causal attention of G key heads under H query heads; position 0 is the cache's first row."""
    q_THC, k_TGC, v_TGC = (
        linear(weights, f"{name}.{role}_proj", x_TD, layer.qkv_bias).unflatten(
            -1, (-1, layer.head_dim)
        )
        for role in "qkv"
    )
    if layer.qk_norm:
        q_THC = rms_norm(q_THC, weights[f"{name}.q_norm.weight"], layer.rms_norm_eps)
        k_TGC = rms_norm(k_TGC, weights[f"{name}.k_norm.weight"], layer.rms_norm_eps)
    cache = {} if cache is None else cache
    past_k, past_v = cache.get(name, (k_TGC[:0], v_TGC[:0]))
    T, S = len(x_TD), len(x_TD) + len(past_k)
    cos_TC, sin_TC = rotary(layer.rope, layer.head_dim, torch.arange(S - T, S))
    q_THC, k_TGC = rotate(q_THC, cos_TC, sin_TC), rotate(k_TGC, cos_TC, sin_TC)
    cache[name] = k_SGC, v_SGC = torch.cat([past_k, k_TGC]), torch.cat([past_v, v_TGC])
    group = layer.num_heads // layer.num_kv_heads
    scores_HTS = torch.einsum("thc,shc->hts", q_THC, k_SGC.repeat_interleave(group, 1)) / math.sqrt(
        layer.head_dim
    )
    is_hidden_TS = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    if layer.window is not None:
        is_hidden_TS |= torch.ones(T, S, dtype=torch.bool).tril(S - T - layer.window)
    scores_HTS = scores_HTS.masked_fill(is_hidden_TS, -math.inf)
    if f"{name}.sinks" in weights:  # one more score of each head, without a value
        sinks_HT1 = weights[f"{name}.sinks"].view(-1, 1, 1).expand(-1, T, 1)
        probs_HTS = torch.cat([scores_HTS, sinks_HT1], -1).softmax(-1)[..., :-1]
    else:
        probs_HTS = scores_HTS.softmax(-1)
    out_THC = torch.einsum("hts,shc->thc", probs_HTS, v_SGC.repeat_interleave(group, 1))
    return linear(weights, f"{name}.o_proj", out_THC.flatten(1), layer.o_bias)


def mlp(layer: Any, weights: Weights, name: str, x_TD: Tensor) -> Tensor:
    if f"{name}.gate.weight" in weights:
        return experts(layer, weights, name, x_TD)
    gate, up = (
        linear(weights, f"{name}.{role}_proj", x_TD, layer.mlp_bias) for role in ("gate", "up")
    )
    return linear(weights, f"{name}.down_proj", F.silu(gate) * up, layer.mlp_bias)


def experts(layer: Any, weights: Weights, name: str, x_TD: Tensor) -> Tensor:
    """Add up the MLPs that a row's router likes best, by its probabilities (Qwen3-MoE)."""
    probs_TE = linear(weights, f"{name}.gate", x_TD).softmax(-1)
    best_TE, ids_TE = probs_TE.topk(layer.num_experts_per_tok)
    if layer.norm_topk_prob:
        best_TE = best_TE / best_TE.sum(-1, keepdim=True)
    weights_TE = torch.zeros_like(probs_TE).scatter(-1, ids_TE, best_TE)
    each = (mlp(layer, weights, f"{name}.experts.{e}", x_TD) for e in range(weights_TE.shape[1]))
    return sum(w_T[:, None] * y_TD for w_T, y_TD in zip(weights_TE.T, each, strict=True))


def linear(weights: Weights, name: str, x: Tensor, has_bias: bool = False) -> Tensor:
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"] if has_bias else None
    scales = weights.get(f"{name}.weight_scale", weights.get(f"{name}.weight_scale_inv"))
    if scales is None:
        return F.linear(x, weight, bias)
    y = fp8_linear(x, weight, scales)
    return y if bias is None else y + bias


def fp8_linear(x_TK: Tensor, codes_NK: Tensor, scales: Tensor) -> Tensor:
    """Multiply numbers of e4m3: x is rounded to it, divided by a scale of its own row.

    scales: of the weight's rows [N, 1], or of blocks of 128 by 128: then x has one for each 128
    columns
    """
    N, K = codes_NK.shape
    if len(scales) == N:
        q_TK, scales_T1 = quantised(x_TK)
        return q_TK @ codes_NK.T * scales_T1 * scales.view(1, N)
    y_TN = torch.zeros(len(x_TK), N)
    for j, first in enumerate(range(0, K, 128)):
        q_TX, scales_T1 = quantised(x_TK[:, first : first + 128])
        scales_1N = scales[:, j].repeat_interleave(128)[None, :N]
        y_TN += q_TX @ codes_NK[:, first : first + 128].T * (scales_T1 * scales_1N)
    return y_TN


def quantised(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to e4m3, whose largest number is 448; return it with its scale [T, 1]."""
    scales_T1 = x_TK.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    return (x_TK / scales_T1).clamp(-448, 448).to(torch.float8_e4m3fn).float(), scales_T1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x_THC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """RoPE (arXiv 2104.09864) on the pairs (c, c + C / 2)."""
    first, second = x_THC.chunk(2, -1)
    return x_THC * cos_TC[:, None] + torch.cat([-second, first], -1) * sin_TC[:, None]


def rotary(rope: Any, head_dim: int, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, C] of positions times frequencies; scaled kinds divide some by the factor."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2) / head_dim)
    keep = kept_share(rope, head_dim, frequencies).clamp(0, 1)
    angles_TC = torch.outer(
        positions_T.float(), frequencies * (keep + (1 - keep) / rope.factor)
    ).repeat(1, 2)
    scale = yarn_scale(rope) if rope.kind == "yarn" else 1.0
    return scale * angles_TC.cos(), scale * angles_TC.sin()


def kept_share(rope: Any, head_dim: int, frequencies: Tensor) -> Tensor:
    """1 where a frequency stays, 0 where it is divided (Llama 3.1; yarn: arXiv 2309.00071)."""
    if rope.kind in ("default", "linear"):
        return torch.full_like(frequencies, float(rope.kind == "default"))
    if rope.kind == "llama3":
        turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        return (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    assert rope.kind == "yarn", rope.kind
    # the channels that turn beta_fast and beta_slow times over the original context
    wavelengths = [
        rope.original_max_position_embeddings / turns for turns in (rope.beta_fast, rope.beta_slow)
    ]
    low, high = (
        head_dim * math.log(w / (2 * math.pi)) / (2 * math.log(rope.theta)) for w in wavelengths
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return 1 - (torch.arange(head_dim // 2) - low) / (high - low or 0.001)


def yarn_scale(rope: Any) -> float:
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    growth = 0.1 * math.log(max(rope.factor, 1))
    if rope.mscale and rope.mscale_all_dim:
        return (rope.mscale * growth + 1) / (rope.mscale_all_dim * growth + 1)
    return growth + 1


def read_weights(directory: str | Path) -> Weights:
    """Every tensor of every shard, floating ones in float32."""
    shards = [load_file(path) for path in sorted(Path(directory).glob("*.safetensors"))]
    return {
        name: t.float() if t.is_floating_point() else t
        for shard in shards
        for name, t in shard.items()
    }


def read_layer(config: dict[str, Any], weights: Weights) -> SimpleNamespace:
    num_heads = config["num_attention_heads"]
    return SimpleNamespace(
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        rms_norm_eps=config["rms_norm_eps"],
        rope=read_rope(config),
        qkv_bias="layers.0.self_attn.q_proj.bias" in weights,
        o_bias="layers.0.self_attn.o_proj.bias" in weights,
        mlp_bias="layers.0.mlp.gate_proj.bias" in weights,
        qk_norm="layers.0.self_attn.q_norm.weight" in weights,
        num_experts_per_tok=config.get("num_experts_per_tok"),
        norm_topk_prob=config.get("norm_topk_prob", False),
        window=config["sliding_window"] if config.get("model_type") == "mistral" else None,
    )


def read_rope(config: dict[str, Any]) -> SimpleNamespace:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    rope = config.get("rope_parameters") or {**config, **(config.get("rope_scaling") or {})}
    defaults = {
        "factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
        "truncate": True,
    }
    return SimpleNamespace(
        theta=rope.get("rope_theta", 10000.0),
        kind=rope.get("rope_type", rope.get("type", "default")),
        **{
            key: default if rope.get(key) is None else rope[key]
            for key, default in defaults.items()
        },
    )
