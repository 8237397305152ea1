"""EAGLE drafting without caches: the formulas of EAGLE-1 (arXiv 2401.15077) and EAGLE-3 (2503.01840), flag by flag.

Row t eats the pair (hidden of t, token x_{t+1}) at position t and predicts x_{t+2}. Rows of committed pairs take the
target's features; each further step of a chain takes the draft's own output of the row before it. A step computes all
rows from the first one on. Configs have the fields of weights/config.py:EagleConfig, weights its canonical names before
fusing (q_proj, k_proj, v_proj, gate_proj, up_proj). Imports nothing of ours.

T rows, D hidden, E width of the target's features, X = E before fc or D behind it, K draft tokens, W draft vocabulary.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.reference import Reference, Weights, attention, linear, mlp, read_layer, read_weights, rms_norm


@torch.no_grad()
def draft_logits(
    cfg: Any, weights: Weights, tokens: Sequence[int], features_TE: Tensor, num_steps: int, teacher: Sequence[int] = ()
) -> Tensor:
    """The logits [num_steps, W] of a chain behind the committed tokens.

    tokens:      x_0 .. x_n; x_n is sampled, the target has not seen it yet
    features_TE: target_features of x_0 .. x_{n-1}
    teacher:     the target's ids that follow x_n; where they end the chain continues on its own argmax
    """
    rows_TX = features_TE if cfg.entry == "fc" else fuse(cfg, weights, features_TE)
    tokens, logits = list(tokens[1:]), []
    for step in range(num_steps):
        logits_TW, recycled_TD = forward(cfg, weights, tokens, rows_TX)
        logits.append(logits_TW[-1])
        tokens.append(teacher[step] if step < len(teacher) else target_id(cfg, weights, logits[-1]))
        rows_TX = torch.cat([rows_TX, recycled_TD[-1:]])
    return torch.stack(logits)


def forward(cfg: Any, weights: Weights, tokens: Sequence[int], rows_TX: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T, W] and the hidden states [T, D] to recycle.

    tokens:  x_1 .. x_T, one later than the hidden state of its row
    rows_TX: features for entry "fc", whose norms and fc see every row; fused features for entry "qkv"
    """

    def norm(name: str, x: Tensor, is_there: bool = True) -> Tensor:
        return rms_norm(x, weights[f"{name}.weight"], cfg.layer.rms_norm_eps) if is_there else x

    embed_TD = norm("embed_norm", weights["embed_tokens.weight"][tokens], cfg.has_embed_norm)
    if cfg.entry == "fc":
        rows_TX = feature_norms(cfg, weights, rows_TX)
        stream_TD = linear(weights, "fc", torch.cat([embed_TD, rows_TX], -1), cfg.fc_bias)
        x = norm("layers.0.input_layernorm", stream_TD, cfg.has_input_layernorm)
    else:
        normed_TD = norm("layers.0.hidden_norm", rows_TX, cfg.has_hidden_norm)
        stream_TD = normed_TD if cfg.norm_before_residual else rows_TX
        embed_TD = norm("layers.0.input_layernorm", embed_TD, cfg.has_input_layernorm)
        x = torch.cat([embed_TD, normed_TD], -1)
    for i in range(cfg.num_layers):
        name = f"layers.{i}"
        x = norm(f"{name}.input_layernorm", stream_TD) if i > 0 else x
        stream_TD = stream_TD + attention(cfg.layer, weights, f"{name}.self_attn", x)
        x = norm(f"{name}.post_attention_layernorm", stream_TD)
        stream_TD = stream_TD + mlp(cfg.layer, weights, f"{name}.mlp", x)
    normed_TD = norm("norm", stream_TD, cfg.has_final_norm)
    return linear(weights, "lm_head", normed_TD), normed_TD if cfg.recycled == "post_norm" else stream_TD


def target_features(cfg: Any, boundaries: Any, hidden_TD: Tensor) -> Tensor:
    """[T, E]: the tapped boundaries side by side, or the target's hidden behind its final norm."""
    return torch.cat([boundaries[i] for i in cfg.aux_boundaries], -1) if cfg.aux_boundaries else hidden_TD


def fuse(cfg: Any, weights: Weights, features_TE: Tensor) -> Tensor:
    features_TE = feature_norms(cfg, weights, features_TE)
    return linear(weights, "fc", features_TE, cfg.fc_bias) if cfg.has_fc else features_TE


def feature_norms(cfg: Any, weights: Weights, features_TE: Tensor) -> Tensor:
    eps = cfg.layer.rms_norm_eps
    if cfg.norm_before_fc:
        features_TE = rms_norm(features_TE, weights["input_norm.weight"], eps)
    if cfg.has_fc_norm:
        taps = enumerate(features_TE.split(cfg.target_hidden_size, -1))
        features_TE = torch.cat([rms_norm(tap, weights[f"fc_norm.{i}.weight"], eps) for i, tap in taps], -1)
    return features_TE


def target_id(cfg: Any, weights: Weights, logits_W: Tensor) -> int:
    best = int(logits_W.argmax())
    return int(weights["d2t"][best]) if cfg.has_d2t else best


def borrow(cfg: Any, weights: Weights, target: Weights) -> Weights:
    """The draft's weights with what it takes from the target, whose head may be its embedding."""
    weights, embed = dict(weights), target["embed_tokens.weight"]
    if not cfg.has_own_embedding:
        weights["embed_tokens.weight"] = embed
    if not cfg.has_own_head:
        weights["lm_head.weight"] = target.get("lm_head.weight", embed)
    return weights


@dataclass
class Generation:
    """Greedy tokens, and for each round what it accepted and how far the draft was from choosing otherwise."""

    tokens: list[int]
    num_accepted: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # best draft logit minus second, least up to the first rejection

    def num_accepted_at(self, num_drafts: int) -> list[int]:
        return [sum(accepted >= k for accepted in self.num_accepted) for k in range(1, num_drafts + 1)]


def generate(
    target: Reference, cfg: Any, weights: Weights, prompt: list[int], num_tokens: int, num_drafts: int
) -> Generation:
    """Greedy speculative decoding; each round recomputes target and draft over everything.

    A draft that passes the last wanted token is not accepted. The target's token behind the last accepted draft may
    pass it, and is cut. The first token comes from the prompt alone and belongs to no round.
    """
    outputs = target.forward(prompt)
    tokens, end = [*prompt, int(outputs.logits_TV[-1].argmax())], len(prompt) + num_tokens
    run = Generation(tokens)
    while len(tokens) < end:
        features_TE = target_features(cfg, outputs.boundaries, outputs.hidden_TD)[: len(tokens) - 1]
        logits_KW = draft_logits(cfg, weights, tokens, features_TE, num_drafts)
        drafts = [target_id(cfg, weights, logits_W) for logits_W in logits_KW]
        outputs = target.forward(tokens + drafts)
        choices = outputs.logits_TV[len(tokens) - 1 :].argmax(-1).tolist()
        num_equal = next((k for k in range(num_drafts) if drafts[k] != choices[k]), num_drafts)
        run.num_accepted.append(min(num_equal, end - len(tokens)))
        best_K2 = logits_KW[: num_equal + 1].topk(2).values
        run.margins.append(float((best_K2[:, 0] - best_K2[:, 1]).min()))
        tokens += choices[: num_equal + 1]
    run.tokens = tokens[len(prompt) : end]
    return run


def read_draft(directory: str | Path, aux_boundaries: tuple[int, ...] = ()) -> tuple[SimpleNamespace, Weights]:
    """Config and weights of a draft in a reference layout: EAGLE-3 if it taps boundaries, else EAGLE-1."""
    config = json.loads((Path(directory) / "config.json").read_text())
    weights = {name.replace("midlayer.", "layers.0."): t for name, t in read_weights(directory).items()}
    if "d2t" in weights:
        weights["d2t"] += torch.arange(len(weights["d2t"]))  # the file has offsets
    is_eagle3 = bool(aux_boundaries)
    cfg = SimpleNamespace(
        layer=read_layer(config, weights),
        num_layers=config["num_hidden_layers"],
        target_hidden_size=config.get("target_hidden_size", config["hidden_size"]),
        aux_boundaries=aux_boundaries,
        entry="qkv" if is_eagle3 else "fc",
        has_fc=True,
        fc_bias="fc.bias" in weights,
        norm_before_fc=False,
        has_fc_norm=False,
        has_embed_norm=False,
        has_input_layernorm=is_eagle3,
        has_hidden_norm=is_eagle3,
        norm_before_residual=False,
        has_final_norm=is_eagle3,
        recycled="pre_norm",
        has_own_embedding="embed_tokens.weight" in weights,
        has_own_head="lm_head.weight" in weights,
        has_d2t="d2t" in weights,
    )
    return cfg, weights
