"""Block drafting without caches, by the formulas: DFlash (arXiv 2602.06036), DSpark (2607.05147),
DFlash2 (z-lab/dflash).

A draft of the tokens x_0 .. x_n, of which the target has not seen x_n, runs the rows [x_n, mask,
mask, ...] at positions n, n + 1, ...; keys and values come from the target's features of x_0 ..
x_{n-1} and from the rows themselves, and every row sees all of them. Everything is computed from
the first token on. Reads each public format on its own. Imports nothing of ours.

T tokens with features, R rows of a block, K drafts, D hidden, E width of the features, V target
vocabulary, W draft vocabulary, r rank.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.naive_eagle import Scores, draft_ids, greedy, target_features
from tests.naive_tree import GREEDY, DraftRow, Sampling, Shape, Tree, draft_tree
from tests.reference import (
    Reference,
    Weights,
    linear,
    mlp,
    read_layer,
    read_weights,
    rms_norm,
    rotary,
    rotate,
)

LANES = 4096

# what a test may get wrong on purpose, as cfg.mutant
MUTANTS = (
    *("causal block", "anchor is a mask", "bias after temperature", "markov_w1 by draft id"),
    *("one position early", "context through input_layernorm", "no hidden_norm"),
)
MUTANTS_OF_DFLASH2 = (
    *("no row before", "halves swapped", "no base", "blocks run on"),
    *("codebooks swapped", "selected of all ids", "always from the anchor"),
)


@dataclass
class Block:
    """What a draft proposes after some tokens, by draft."""

    logits_KW: Tensor  # with what the markov head adds
    scores_KW: Tensor  # by which the tokens are chosen
    tokens: list[int]  # the target's ids
    confidences: list[float]  # empty without such a head


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
    n, mutant = len(tokens) - 1, getattr(cfg, "mutant", None)
    num_rows = min(num_drafts + (not cfg.anchor_proposes), longest - n)
    ids = [tokens[-1], *[cfg.mask_token_id] * (num_rows - 1)]
    if mutant == "anchor is a mask":
        ids[0] = cfg.mask_token_id
    hidden_RD = backbone(cfg, weights, ids, features_TE)
    hidden_KD = hidden_RD if cfg.anchor_proposes else hidden_RD[1:]
    ids_W = draft_ids(cfg, weights)
    before, state = tokens[-1], None
    found = Block(torch.empty(0, len(ids_W)), torch.empty(0, len(ids_W)), [], [])
    for i, h_D in enumerate(hidden_KD):
        z_W = linear(weights, "lm_head", h_D)
        token = before
        if mutant == "markov_w1 by draft id" and i > 0:
            token = int((ids_W == before).nonzero()[0])
        e_r = weights["markov_head.markov_w1.weight"][token] if cfg.markov else None
        bias_W, state = markov(cfg, weights, e_r, h_D, state)
        biased_W = z_W if bias_W is None else z_W + bias_W
        if bias_W is not None:
            is_out_W = torch.ones_like(z_W, dtype=torch.bool)
            is_out_W[candidates(scores(z_W, n + 1 + i, ids_W))] = False
            biased_W = biased_W.masked_fill(is_out_W, -torch.inf)
        if cfg.selector_top_k:
            is_blind = mutant == "candidates without noise"
            base_W = z_W if is_blind else scores(z_W, n + 1 + i, ids_W)
            before = tokens[-1] if mutant == "always from the anchor" else before
            biased_W = select(cfg, weights, z_W, base_W, before, h_D)
        score_W = scores(biased_W, n + 1 + i, ids_W)
        if mutant == "bias after temperature":
            score_W = scores(z_W, n + 1 + i, ids_W) + (biased_W - z_W)
        before = int(ids_W[score_W.argmax()])
        found.logits_KW = torch.cat([found.logits_KW, biased_W[None]])
        found.scores_KW = torch.cat([found.scores_KW, score_W[None]])
        found.tokens.append(before)
        if cfg.confidence:
            read = torch.cat([h_D, e_r]) if cfg.confidence == "markov" else h_D
            found.confidences.append(
                float(linear(weights, "confidence_head.proj", read, True).sigmoid())
            )
    return found


@torch.no_grad()
def propose_tree(
    cfg: Any,
    weights: Weights,
    tokens: Sequence[int],
    features_TE: Tensor,
    shape: Shape,
    sampling: Sampling = GREEDY,
) -> Tree:
    """Grow a tree after x_0 .. x_n from one block, whose rows serve all nodes of their depth."""
    ids_W = draft_ids(cfg, weights)
    ids = [tokens[-1], *[cfg.mask_token_id] * (shape.num_levels - cfg.anchor_proposes)]
    hidden_RD = backbone(cfg, weights, ids, features_TE)
    hidden_KD = hidden_RD if cfg.anchor_proposes else hidden_RD[1:]

    def row(depth: int, token: int, state_r: Tensor | None) -> DraftRow:
        """What a node of this depth has for its children; the root's is 0."""
        logits_W, h_D = linear(weights, "lm_head", hidden_KD[depth]), hidden_KD[depth]
        e_r = weights["markov_head.markov_w1.weight"][token] if cfg.markov else None
        bias_W, state_r = markov(cfg, weights, e_r, h_D, state_r)
        biased_W = logits_W if bias_W is None else logits_W + bias_W
        return DraftRow(biased_W, torch.tensor(depth), {"state": state_r})

    def step(above: DraftRow, token: int) -> DraftRow:
        return row(int(above.hidden_1X) + 1, token, above.cache["state"])

    def scores(logits_W: Tensor, depth: int) -> Tensor:
        return sampling.perturbed(logits_W, len(tokens) + depth - 1, ids_W)

    return draft_tree(row(0, tokens[-1], None), step, scores, ids_W, shape)


def markov(
    cfg: Any, weights: Weights, e_r: Tensor | None, h_D: Tensor, state_r: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """What the token before adds to the logits [W], and the state for the next draft."""
    if e_r is None:
        return None, None
    f_r, state = e_r, None
    if cfg.markov == "gated":
        f_r = linear(weights, "markov_head.gate_proj", torch.cat([h_D, e_r]), True).sigmoid() * e_r
    if cfg.markov == "rnn":
        s_r = torch.zeros_like(e_r) if state_r is None else state_r
        read = torch.cat([s_r, e_r, h_D])
        g_r, c_r, o_r = linear(weights, "markov_head.joint_proj", read, True).chunk(3)
        state = g_r.sigmoid() * s_r + (1 - g_r.sigmoid()) * c_r.tanh()
        f_r = o_r.tanh()
    return weights["markov_head.markov_w2.weight"] @ f_r, state


def select(
    cfg: Any, weights: Weights, z_W: Tensor, base_W: Tensor, before: int, h_D: Tensor
) -> Tensor:
    """Logits of the best ids with what the selector adds, -inf elsewhere. base: what ranks ids"""
    name, mutant = "candidate_selector", getattr(cfg, "mutant", None)
    codebooks = [weights[f"{name}.{role}_codebook"] for role in ("predecessor", "successor")]
    of_before, of_after = codebooks[::-1] if mutant == "codebooks swapped" else codebooks
    count = len(z_W) if mutant == "selected of all ids" else cfg.selector_top_k
    kept_k = candidates(base_W, count)
    context_s = of_before[before] * linear(weights, f"{name}.hidden_projection", h_D)
    found_W = torch.full_like(z_W, -torch.inf)
    found_W[kept_k] = z_W[kept_k] + of_after[kept_k] @ context_s
    return found_W


def candidates(scores_W: Tensor, count: int | None = None) -> Tensor:
    """Ids with the best scores: of those that are equal modulo LANES, one."""
    best: dict[int, int] = {}
    for id in scores_W.argsort(descending=True, stable=True).tolist():
        best.setdefault(id % LANES, id)
    return torch.tensor([*best.values()][:count])


def convolve(
    cfg: Any, weights: Weights, name: str, normed_RD: Tensor, side: int, x_RD: Tensor
) -> Tensor:
    """Before (side 0) or after (1) a sublayer, whose norm leaves `normed`."""
    mutant = getattr(cfg, "mutant", None)
    if not cfg.conv_group_size:
        return x_RD
    changes_R4G = linear(weights, f"{name}.kernel_projection", normed_RD)
    half_R2G = changes_R4G.unflatten(1, (2, 2, -1))[:, side ^ (mutant == "halves swapped")]
    change_R2D = half_R2G.repeat_interleave(cfg.conv_group_size, -1)
    base_2D = weights[f"{name}.base_kernel"][side]
    if mutant == "no base":
        base_2D = base_2D * 0
    before_RD = torch.cat([torch.zeros_like(x_RD[:1]), x_RD[:-1]])
    if mutant == "no row before":
        before_RD = before_RD * 0
    if mutant == "blocks run on":
        before_RD = torch.cat([x_RD[-1:], x_RD[:-1]])
    weight_R2D = base_2D + change_R2D
    return weight_R2D[:, 0] * x_RD + weight_R2D[:, 1] * before_RD


def backbone(cfg: Any, weights: Weights, ids: list[int], features_TE: Tensor) -> Tensor:
    """Hidden states after the final norm [R, D]."""
    eps, mutant = cfg.layer.rms_norm_eps, getattr(cfg, "mutant", None)

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, weights[f"{name}.weight"], eps)

    context_TD = linear(weights, "fc", features_TE)
    if mutant != "no hidden_norm":
        context_TD = norm("hidden_norm", context_TD)
    stream_RD = weights["embed_tokens.weight"][ids]
    for i in range(cfg.num_layers):
        name = f"layers.{i}"
        x_RD = norm(f"{name}.input_layernorm", stream_RD)
        seen_TD = context_TD
        if mutant == "context through input_layernorm":
            seen_TD = norm(f"{name}.input_layernorm", context_TD)
        conv = partial(convolve, cfg, weights, f"{name}.attention_conv", x_RD)
        out_RD = attention(cfg, weights, f"{name}.self_attn", conv(0, x_RD), seen_TD)
        stream_RD = stream_RD + conv(1, out_RD)
        x_RD = norm(f"{name}.post_attention_layernorm", stream_RD)
        conv = partial(convolve, cfg, weights, f"{name}.mlp_conv", x_RD)
        stream_RD = stream_RD + conv(1, mlp(cfg.layer, weights, f"{name}.mlp", conv(0, x_RD)))
    return norm("norm", stream_RD)


def attention(cfg: Any, weights: Weights, name: str, x_RD: Tensor, context_TD: Tensor) -> Tensor:
    """Attention of a block's rows to the context and to each other."""
    layer, mutant = cfg.layer, getattr(cfg, "mutant", None)
    T, R = len(context_TD), len(x_RD)

    def heads(role: str, x: Tensor) -> Tensor:
        found = linear(weights, f"{name}.{role}_proj", x, layer.qkv_bias)
        found = found.unflatten(-1, (-1, layer.head_dim))
        if layer.qk_norm and role != "v":
            found = rms_norm(found, weights[f"{name}.{role}_norm.weight"], layer.rms_norm_eps)
        return found

    both_SD = torch.cat([context_TD, x_RD])
    positions_S = torch.arange(T + R)
    if mutant == "one position early":
        positions_S[T:] -= 1
    cos_SC, sin_SC = rotary(layer.rope, layer.head_dim, positions_S)
    q_RHC = rotate(heads("q", x_RD), cos_SC[T:], sin_SC[T:])
    group = layer.num_heads // layer.num_kv_heads
    k_SHC = rotate(heads("k", both_SD), cos_SC, sin_SC).repeat_interleave(group, 1)
    v_SHC = heads("v", both_SD).repeat_interleave(group, 1)
    scores_HRS = torch.einsum("rhc,shc->hrs", q_RHC, k_SHC) / layer.head_dim**0.5
    if mutant == "causal block":
        is_later_RS = torch.arange(T + R) > T + torch.arange(R)[:, None]
        scores_HRS = scores_HRS.masked_fill(is_later_RS, -torch.inf)
    out_RHC = torch.einsum("hrs,shc->rhc", scores_HRS.softmax(-1), v_SHC)
    return linear(weights, f"{name}.o_proj", out_RHC.flatten(1), layer.o_bias)


@dataclass
class Generation:
    """Tokens, and of each round its drafts and how many of them hold."""

    tokens: list[int]
    drafts: list[list[int]] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)


def generate(
    target: Reference,
    cfg: Any,
    weights: Weights,
    prompt: list[int],
    num_tokens: int,
    num_drafts: int,
    scores: Scores = greedy,
    longest: int = 1 << 30,
    propose: Callable[..., Block] = propose,
) -> Generation:
    """Exact speculative decoding; each round recomputes target and draft over everything.

    The first token comes from the prompt alone and belongs to no round. propose: as this module's
    """

    def choices(logits_XV: Tensor, position: int) -> list[int]:
        ids_V = torch.arange(logits_XV.shape[1])
        rows = enumerate(logits_XV)
        return [int(scores(logits_V, position + i, ids_V).argmax()) for i, logits_V in rows]

    outputs = target.forward(prompt)
    tokens = [*prompt, *choices(outputs.logits_TV[-1:], len(prompt))]
    end = len(prompt) + num_tokens
    run = Generation(tokens)
    while len(tokens) < end:
        features_TE = target_features(cfg, outputs.boundaries, outputs.hidden_TD)[: len(tokens) - 1]
        block = propose(cfg, weights, tokens, features_TE, num_drafts, scores, longest)
        drafts = block.tokens[: longest - len(tokens)]
        outputs = target.forward(tokens + drafts)
        chosen = choices(outputs.logits_TV[len(tokens) - 1 :], len(tokens))
        num_equal = next((k for k, t in enumerate(drafts) if t != chosen[k]), len(drafts))
        run.drafts.append(drafts)
        run.num_accepted.append(num_equal)
        tokens += chosen[: num_equal + 1]
    run.tokens = tokens[len(prompt) : end]
    return run


def read_draft(directory: str | Path, num_target_layers: int) -> tuple[SimpleNamespace, Weights]:
    """Config and weights of a public format, told by its own signs; taps become boundaries."""
    raw = json.loads((Path(directory) / "config.json").read_text())
    weights = read_weights(directory)
    if "d2t" in weights:
        weights["d2t"] += torch.arange(len(weights["d2t"]))  # the file has offsets
    kind, inner = raw.get("speculators_model_type"), raw.get("transformer_layer_config", raw)
    said = raw | raw.get("dflash_config", {})
    architecture = raw["architectures"][0]
    if kind is not None:
        boundaries = raw["aux_hidden_state_layer_ids"]
        anchor = raw.get("sample_from_anchor", kind == "dspark")
    else:
        ids, D, L = said.get("target_layer_ids"), raw["num_hidden_layers"], num_target_layers
        if ids is None:
            ids = [round(1 + i * (L - 4) / (D - 1)) for i in range(D)] if D > 1 else [L // 2]
        boundaries = [layer + 1 for layer in ids]
        anchor = "DSpark" in architecture or said.get("projector_type") == "dspark"
        anchor = said.get("shift_label", anchor)
    has_selector = "candidate_selector.predecessor_codebook" in weights
    has_markov = "markov_head.markov_w1.weight" in weights
    read = weights.get("confidence_head.proj.weight", torch.empty(1, 0)).shape[1]
    is_wide = read > inner["hidden_size"]
    cfg = SimpleNamespace(
        layer=read_layer(inner, weights),
        num_layers=inner["num_hidden_layers"],
        aux_boundaries=tuple(boundaries),
        block_size=said["block_size"],
        mask_token_id=said["mask_token_id"],
        anchor_proposes=anchor,
        markov=said.get("markov_head_type", "vanilla") if has_markov else None,
        confidence=("markov" if is_wide else "hidden") if read else None,
        conv_group_size=said.get("conv_group_size", 16) if has_selector else 0,
        selector_top_k=said.get("selector_top_k", 16) if has_selector else 0,
        has_own_embedding="embed_tokens.weight" in weights,
        has_own_head="lm_head.weight" in weights,
        has_d2t="d2t" in weights,
    )
    return cfg, weights
