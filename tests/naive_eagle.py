"""EAGLE drafting without caches, flag by flag: EAGLE-1 (arXiv 2401.15077), EAGLE-3 (2503.01840).

Row t eats the pair (hidden of t, token x_{t+1}) at position t and predicts x_{t+2}. Rows of
committed pairs take the target's features; each further step of a chain takes the draft's own
output of the row before it. A step computes all rows from the first one on. Configs have the fields
of weights/draft/config.py:EagleConfig, weights its canonical names before fusing (q_proj, k_proj,
v_proj, gate_proj, up_proj). Imports nothing of ours.

T rows, D hidden, E width of the target's features, X = E before fc or D behind it, K draft tokens,
W draft vocabulary.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.reference import (
    Cache,
    Reference,
    Weights,
    attention,
    linear,
    mlp,
    read_layer,
    read_weights,
    rms_norm,
)

# what a token is chosen by: the scores of logits at a position, whose columns are these token ids
Scores = Callable[[Tensor, int, Tensor], Tensor]


def greedy(logits_V: Tensor, position: int, ids_V: Tensor) -> Tensor:
    return logits_V


@torch.no_grad()
def draft_logits(
    cfg: Any,
    weights: Weights,
    tokens: Sequence[int],
    features_TE: Tensor,
    num_steps: int,
    teacher: Sequence[int] = (),
    scores: Scores = greedy,
) -> Tensor:
    """Logits, or their scores, that choose the drafts after the committed tokens, [num_steps, W].

    tokens:      x_0 .. x_n; x_n is sampled, the target has not seen it yet
    features_TE: target_features of x_0 .. x_{n-1}
    teacher:     the target's ids that follow x_n; behind them the chain goes by its own choice
    """
    num_tokens, ids_W = len(tokens), draft_ids(cfg, weights)
    rows_TX = features_TE if cfg.entry == "fc" else fuse(cfg, weights, features_TE)
    tokens, chain = list(tokens[1:]), []
    for step in range(num_steps):
        logits_TW, recycled_TD = forward(cfg, weights, tokens, rows_TX)
        chain.append(scores(logits_TW[-1], num_tokens + step, ids_W))
        tokens.append(teacher[step] if step < len(teacher) else target_id(cfg, weights, chain[-1]))
        rows_TX = torch.cat([rows_TX, recycled_TD[-1:]])
    return torch.stack(chain)


def forward(
    cfg: Any,
    weights: Weights,
    tokens: Sequence[int],
    rows_TX: Tensor,
    cache: Cache | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits [T, W] and the hidden states [T, D] to recycle.

    tokens:  x_1 .. x_T, one later than the hidden state of its row
    rows_TX: features for entry "fc", whose norms and fc see all rows; else fused features ("qkv")
    cache:   keys and values of earlier rows, which these rows follow and extend
    """

    def norm(name: str, x: Tensor, is_there: bool = True) -> Tensor:
        return rms_norm(x, weights[f"{name}.weight"], cfg.layer.rms_norm_eps) if is_there else x

    embed_TD = norm("embed_norm", weights["embed_tokens.weight"][tokens], cfg.has_embed_norm)
    if cfg.entry == "fc":
        rows_TX = feature_norms(cfg, weights, rows_TX)
        pair = [embed_TD, rows_TX]
        if cfg.has_feature_norm:  # MTP
            pair = [norm("feature_norm", rows_TX), embed_TD]
        stream_TD = linear(weights, "fc", torch.cat(pair, -1), cfg.fc_bias)
        x = norm("layers.0.input_layernorm", stream_TD, cfg.has_input_layernorm)
    else:
        normed_TD = norm("layers.0.hidden_norm", rows_TX, cfg.has_hidden_norm)
        stream_TD = normed_TD if cfg.norm_before_residual else rows_TX
        embed_TD = norm("layers.0.input_layernorm", embed_TD, cfg.has_input_layernorm)
        x = torch.cat([embed_TD, normed_TD], -1)
    for i in range(cfg.num_layers):
        name = f"layers.{i}"
        x = norm(f"{name}.input_layernorm", stream_TD) if i > 0 else x
        stream_TD = stream_TD + attention(cfg.layer, weights, f"{name}.self_attn", x, cache)
        x = norm(f"{name}.post_attention_layernorm", stream_TD)
        stream_TD = stream_TD + mlp(cfg.layer, weights, f"{name}.mlp", x)
    normed_TD = norm("norm", stream_TD, cfg.has_final_norm)
    return linear(
        weights, "lm_head", normed_TD
    ), normed_TD if cfg.recycled == "post_norm" else stream_TD


def target_features(cfg: Any, boundaries: Any, hidden_TD: Tensor) -> Tensor:
    """[T, E]: the tapped boundaries side by side, or the target's hidden behind its final norm."""
    return (
        torch.cat([boundaries[i] for i in cfg.aux_boundaries], -1)
        if cfg.aux_boundaries
        else hidden_TD
    )


def fuse(cfg: Any, weights: Weights, features_TE: Tensor) -> Tensor:
    features_TE = feature_norms(cfg, weights, features_TE)
    return linear(weights, "fc", features_TE, cfg.fc_bias) if cfg.has_fc else features_TE


def feature_norms(cfg: Any, weights: Weights, features_TE: Tensor) -> Tensor:
    eps = cfg.layer.rms_norm_eps
    if cfg.norm_before_fc:
        features_TE = rms_norm(features_TE, weights["input_norm.weight"], eps)
    if cfg.has_fc_norm:
        taps = enumerate(features_TE.split(cfg.target_hidden_size, -1))
        features_TE = torch.cat(
            [rms_norm(tap, weights[f"fc_norm.{i}.weight"], eps) for i, tap in taps], -1
        )
    return features_TE


def draft_ids(cfg: Any, weights: Weights) -> Tensor:
    """The target's id of each of the draft's."""
    return weights["d2t"] if cfg.has_d2t else torch.arange(len(weights["lm_head.weight"]))


def target_id(cfg: Any, weights: Weights, logits_W: Tensor) -> int:
    return int(draft_ids(cfg, weights)[logits_W.argmax()])


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
    """Tokens; for each round, what it accepted and how near the draft was to another choice."""

    tokens: list[int]
    num_accepted: list[int] = field(default_factory=list)
    margins: list[float] = field(
        default_factory=list
    )  # best draft score minus second, least up to the first rejection

    def num_accepted_at(self, num_drafts: int) -> list[int]:
        return [
            sum(accepted >= k for accepted in self.num_accepted) for k in range(1, num_drafts + 1)
        ]


def generate(
    target: Reference,
    cfg: Any,
    weights: Weights,
    prompt: list[int],
    num_tokens: int,
    num_drafts: int,
    scores: Scores = greedy,
) -> Generation:
    """Exact speculative decoding; each round recomputes target and draft over everything.

    A draft that passes the last wanted token is not accepted. The target's token behind the last
    accepted draft may pass it, and is cut. The first token comes from the prompt alone and belongs
    to no round.
    """

    def choices(logits_XV: Tensor, position: int) -> list[int]:
        """The target's tokens from `position` on."""
        ids_V = torch.arange(logits_XV.shape[1])
        return [
            int(scores(logits_V, position + i, ids_V).argmax())
            for i, logits_V in enumerate(logits_XV)
        ]

    outputs = target.forward(prompt)
    tokens, end = [*prompt, *choices(outputs.logits_TV[-1:], len(prompt))], len(prompt) + num_tokens
    run = Generation(tokens)
    while len(tokens) < end:
        features_TE = target_features(cfg, outputs.boundaries, outputs.hidden_TD)[: len(tokens) - 1]
        scores_KW = draft_logits(cfg, weights, tokens, features_TE, num_drafts, scores=scores)
        drafts = [target_id(cfg, weights, scores_W) for scores_W in scores_KW]
        outputs = target.forward(tokens + drafts)
        chosen = choices(outputs.logits_TV[len(tokens) - 1 :], len(tokens))
        num_equal = next((k for k in range(num_drafts) if drafts[k] != chosen[k]), num_drafts)
        run.num_accepted.append(min(num_equal, end - len(tokens)))
        best_K2 = scores_KW[: num_equal + 1].topk(2).values
        run.margins.append(float((best_K2[:, 0] - best_K2[:, 1]).min()))
        tokens += chosen[: num_equal + 1]
    run.tokens = tokens[len(prompt) : end]
    return run


def sampled(temperature: float, seed: int, top_k: int = 0) -> Scores:
    """Scores with the public noise of exact sampling: logit / temperature + g among the top_k."""

    def scores(logits_V: Tensor, position: int, ids_V: Tensor) -> Tensor:
        noisy_V = logits_V.double() / temperature + gumbel(seed, position, ids_V)
        least = logits_V.topk(top_k).values[-1] if top_k else -math.inf
        return noisy_V.masked_fill(logits_V < least, -math.inf)

    return scores


def gumbel(seed: int, position: int, ids_V: Tensor) -> Tensor:
    """g = -log(e) of the token to be drawn at a position, in float64.

    One draw of 32 bits r gives e = -log of u, u = 1 - (r + 0.5) / 2^32. Four neighbouring ids share
    a counter (id >> 2, position, 0, 0).
    """
    ids = ids_V.numpy().astype(np.uint64)
    words = philox((seed % 2**32, seed >> 32), (ids >> np.uint64(2), position, 0, 0))
    draws = np.choose((ids & np.uint64(3)).astype(np.int64), words).astype(np.float64)
    return torch.from_numpy(-np.log(-np.log1p(-(draws + 0.5) / 2**32)))


def philox(key: tuple[int, int], counter: Sequence[Any]) -> list[Any]:
    """Philox4x32 of 10 rounds (Salmon et al., 2011)."""
    low = np.uint64(0xFFFFFFFF)
    x0, x1, x2, x3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    for turn in range(10):
        keys = [
            np.uint64((word + turn * step) % 2**32)
            for word, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
        ]
        left, right = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0, x1 = right >> np.uint64(32) ^ x1 ^ keys[0], right & low
        x2, x3 = left >> np.uint64(32) ^ x3 ^ keys[1], left & low
    return [x0, x1, x2, x3]


def read_draft(
    directory: str | Path, aux_boundaries: tuple[int, ...] = ()
) -> tuple[SimpleNamespace, Weights]:
    """Config and weights of a draft in a reference layout: EAGLE-3 if it has taps, else EAGLE-1."""
    config = json.loads((Path(directory) / "config.json").read_text())
    weights = {
        name.replace("midlayer.", "layers.0."): t for name, t in read_weights(directory).items()
    }
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
        has_feature_norm=False,
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
