"""P-EAGLE drafting without caches (arXiv 2602.01469), by the formulas.

After the tokens x_0 .. x_n, of which the target has not seen x_n, row t < n eats the pair (the
target's feature of t, x_{t+1}) at position t, as in EAGLE-3. Rows n, n + 1, ... embed the mask
token and have the fused mask_hidden as their feature. All are causal, and row n - 1 + i proposes
the token at n + 1 + i. Reads each public format on its own. Imports nothing of ours.

T rows with features, R mask rows, S rows of both, K drafts, D hidden, E width of the features, W
draft vocabulary, H query heads, C channels of a head.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.naive_block import Block
from tests.naive_eagle import Scores, draft_ids, feature_norms, fuse, greedy
from tests.reference import (
    Weights,
    linear,
    mlp,
    read_layer,
    read_weights,
    rms_norm,
    rotary,
    rotate,
)

# what a test may get wrong on purpose, as cfg.mutant
MUTANTS = (
    *("masks see later masks", "one position early", "the seed is not seen", "masks recycle"),
    *("mask_hidden without its norm", "mask_hidden without fc", "masks embed the last token"),
    "norm_before_residual is flipped",
)


@torch.no_grad()
def propose(
    cfg: Any,
    weights: Weights,
    tokens: Sequence[int],
    features_TE: Tensor,
    num_drafts: int,
    scores: Scores = greedy,
    longest: int = 1 << 30,
) -> Block:
    """Draft after x_0 .. x_n. longest: of the context; no row is at this position or later."""
    n = len(tokens) - 1
    num_masks = min(num_drafts - 1, longest - n)
    hidden_KD = hidden_states(cfg, weights, tokens, features_TE, num_masks)[n - 1 :]
    logits_KW, ids_W = linear(weights, "lm_head", hidden_KD), draft_ids(cfg, weights)
    rows = enumerate(logits_KW)
    scores_KW = torch.stack([scores(logits_W, n + 1 + i, ids_W) for i, logits_W in rows])
    return Block(logits_KW, scores_KW, ids_W[scores_KW.argmax(1)].tolist(), [])


def hidden_states(
    cfg: Any, weights: Weights, tokens: Sequence[int], features_TE: Tensor, num_masks: int
) -> Tensor:
    """Hidden states after the final norm [S, D]."""
    eps, mutant, T = cfg.layer.rms_norm_eps, getattr(cfg, "mutant", None), len(features_TE)

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, weights[f"{name}.weight"], eps)

    mask = tokens[-1] if mutant == "masks embed the last token" else cfg.mask_token_id
    embed_SD = weights["embed_tokens.weight"][[*tokens[1:], *[mask] * num_masks]]
    g_TD = fuse(cfg, weights, features_TE)
    g_1D = g_TD[-1:] if mutant == "masks recycle" else mask_feature(cfg, weights)
    g_SD = torch.cat([g_TD, g_1D.expand(num_masks, -1)])
    normed_SD = norm("layers.0.hidden_norm", g_SD)
    is_flipped = mutant == "norm_before_residual is flipped"
    stream_SD = normed_SD if cfg.norm_before_residual != is_flipped else g_SD
    x_SD = torch.cat([norm("layers.0.input_layernorm", embed_SD), normed_SD], -1)
    for i in range(cfg.num_layers):
        name = f"layers.{i}"
        x_SD = norm(f"{name}.input_layernorm", stream_SD) if i > 0 else x_SD
        stream_SD = stream_SD + attention(cfg, weights, f"{name}.self_attn", x_SD, T)
        x_SD = norm(f"{name}.post_attention_layernorm", stream_SD)
        stream_SD = stream_SD + mlp(cfg.layer, weights, f"{name}.mlp", x_SD)
    return norm("norm", stream_SD)


def mask_feature(cfg: Any, weights: Weights) -> Tensor:
    """What mask rows have in place of the target's features [1, D]."""
    mask_1E, mutant = weights["mask_hidden"].view(1, -1), getattr(cfg, "mutant", None)
    if mutant == "mask_hidden without its norm":
        return linear(weights, "fc", mask_1E)
    if mutant == "mask_hidden without fc":
        return feature_norms(cfg, weights, mask_1E)[:, : len(weights["norm.weight"])]
    return fuse(cfg, weights, mask_1E)


def attention(cfg: Any, weights: Weights, name: str, x_SD: Tensor, num_context: int) -> Tensor:
    """Causal attention of rows at positions 0, 1, ..., the first num_context of which are kept."""
    layer, mutant = cfg.layer, getattr(cfg, "mutant", None)
    T, S = num_context, len(x_SD)

    def heads(role: str) -> Tensor:
        found = linear(weights, f"{name}.{role}_proj", x_SD, layer.qkv_bias)
        found = found.unflatten(-1, (-1, layer.head_dim))
        if layer.qk_norm and role != "v":
            found = rms_norm(found, weights[f"{name}.{role}_norm.weight"], layer.rms_norm_eps)
        return found

    positions_S = torch.arange(S)
    is_hidden_SS = positions_S > positions_S[:, None]
    if mutant == "masks see later masks":
        is_hidden_SS[T:] = False
    if mutant == "the seed is not seen":
        is_hidden_SS[T:, T - 1] = True
    if mutant == "one position early":
        positions_S[T:] -= 1
    cos_SC, sin_SC = rotary(layer.rope, layer.head_dim, positions_S)
    group = layer.num_heads // layer.num_kv_heads
    q_SHC = rotate(heads("q"), cos_SC, sin_SC)
    k_SHC = rotate(heads("k"), cos_SC, sin_SC).repeat_interleave(group, 1)
    scores_HSS = torch.einsum("qhc,khc->hqk", q_SHC, k_SHC) / layer.head_dim**0.5
    probs_HSS = scores_HSS.masked_fill(is_hidden_SS, -torch.inf).softmax(-1)
    out_SHC = torch.einsum("hqk,khc->qhc", probs_HSS, heads("v").repeat_interleave(group, 1))
    return linear(weights, f"{name}.o_proj", out_SHC.flatten(1), layer.o_bias)


def read_draft(directory: str | Path, num_target_layers: int) -> tuple[SimpleNamespace, Weights]:
    """Config and weights of a public format, told by its own signs."""
    raw = json.loads((Path(directory) / "config.json").read_text())
    inner, L = raw.get("transformer_layer_config", raw), num_target_layers
    said = raw | raw.get("eagle_config", {})
    weights = {
        name.replace("midlayer.", "layers.0."): t for name, t in read_weights(directory).items()
    }
    if "d2t" in weights:
        weights["d2t"] += torch.arange(len(weights["d2t"]))  # the file has offsets
    token = next(raw[key] for key in ("mask_token_id", "ptd_token_id", "pard_token") if key in raw)
    taps = said.get("eagle_aux_hidden_state_layer_ids", (2, L // 2, L - 3))
    cfg = SimpleNamespace(
        layer=read_layer(inner, weights),
        num_layers=inner["num_hidden_layers"],
        target_hidden_size=weights["mask_hidden"].numel() // len(taps),
        aux_boundaries=tuple(taps),
        entry="qkv",
        has_fc=True,
        fc_bias=False,
        norm_before_fc="input_norm.weight" in weights,
        has_fc_norm="fc_norm.0.weight" in weights,
        norm_before_residual=raw.get("norm_before_residual", False),
        mask_token_id=token,
        has_own_embedding="embed_tokens.weight" in weights,
        has_own_head="lm_head.weight" in weights,
        has_d2t="d2t" in weights,
    )
    return cfg, weights
