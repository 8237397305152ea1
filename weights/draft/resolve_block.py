"""Block drafts (DFlash, DSpark, DFlash2): from config.json and tensor shapes to one BlockConfig.

The order: layer, vocabulary, taps, block, heads, owners; each is logged with its source.
"""

from collections.abc import Mapping
from typing import Literal

from weights.draft.config import BlockConfig
from weights.draft.layer import resolve_layer
from weights.draft.layouts import ONLY_OF_BLOCKS, BlockLayout
from weights.draft.sizes import (
    check_borrowing,
    mask_token,
    num_layers_of,
    target_hidden_size,
    vocabulary,
)
from weights.draft.sources import Sources
from weights.draft.taps import Default, TapRules, num_taps, resolve_taps
from weights.fields import layer_types

MARKOV = "markov_head."
RANKS = {f"{MARKOV}markov_w1.weight": 1, f"{MARKOV}markov_w2.weight": 1}  # axes of its rank
CONFIDENCE = "confidence_head.proj.weight"
SELECTOR = "candidate_selector."
CODES = {  # axes of its rank
    f"{SELECTOR}predecessor_codebook": 1,
    f"{SELECTOR}successor_codebook": 1,
    f"{SELECTOR}hidden_projection.weight": 0,
}
PROJECTORS = ("dflash", "dspark")  # the values of projector_type that change nothing here

Markov = Literal["vanilla", "gated", "rnn"]
KINDS: dict[str, Markov] = {"vanilla": "vanilla", "gated": "gated", "rnn": "rnn"}


def resolve_block(sources: Sources, layout: BlockLayout) -> BlockConfig:
    fields, log = sources.fields, sources.log
    layer = resolve_layer(sources)
    V, W = vocabulary(sources)
    Dt = target_hidden_size(sources, layer.hidden_size)
    num_layers = num_layers_of(sources)
    _refuse_others(sources, num_layers)
    rules = TapRules(
        format=layout,
        default=_spread_taps(num_layers) if layout.spreads_taps else None,
        least=-1 if layout.layer_ids == "output" else 0,
        family_decides=False,
    )
    boundaries = resolve_taps(sources, rules, num_taps(sources, Dt))
    markov, rank = _markov(sources, layout)
    group_size, selector_rank, top_k = 0, 0, 0
    if layout.selector is not None:
        group_size, selector_rank, top_k = _selector(sources, layout.selector)
        _check_selector(sources, group_size, layer.hidden_size, top_k, (V, W))
        if markov is not None:
            where = sources.where("markov_rank", *RANKS)
            fields.problems.add(f"{where}: a markov_head beside a selector is not supported")
    config = BlockConfig(
        format=layout.name,
        layer=layer,
        num_layers=num_layers,
        vocab_size=V,
        draft_vocab_size=W,
        target_hidden_size=Dt,
        max_position_embeddings=fields.get(int, "max_position_embeddings", 2048),
        aux_boundaries=boundaries,
        block_size=_block_size(sources, layout),
        mask_token_id=mask_token(sources, V),
        anchor_proposes=_anchor_proposes(sources, layout),
        markov=markov,
        markov_rank=rank,
        confidence=_confidence(sources, layout, rank),
        conv_group_size=group_size,
        selector_rank=selector_rank,
        selector_top_k=top_k,
        has_own_embedding=sources.owns("has_own_embedding", "embed_tokens.weight"),
        has_own_head=sources.owns("has_own_head", "lm_head.weight"),
        has_d2t=sources.has("d2t") or W != V,
    )
    if config.markov == "rnn" and not config.anchor_proposes:
        # speculators trains its state over the anchor's row too, which has no logits here
        what = "beside an anchor that proposes nothing is not supported"
        fields.problems.add(f"{fields.source('markov_head_type')} 'rnn' {what}")
    log.add_read(fields, config, max_position_embeddings="max_position_embeddings")
    log.add("d2t", "offsets" if sources.has("d2t") else None, sources.presence("d2t"))
    check_borrowing(config, sources)
    return config


def _refuse_others(sources: Sources, num_layers: int) -> None:
    """Refuse what changes the computation, by its name."""
    fields = sources.fields
    for key, (only, what) in ONLY_OF_BLOCKS.items():
        value = fields.values.get(key, only)
        if value != only and not (value == "mha" and only == "gqa"):
            fields.problems.add(f"{fields.source(key)} {value!r:.80}: {what} is not supported")
    if "sliding_attention" in layer_types(fields)[:num_layers]:
        what = "a block draft with windows is not supported"
        fields.problems.add(f"{fields.source('layer_types')} sliding_attention: {what}")
    projector = fields.find(str, "projector_type")
    if projector not in (None, *PROJECTORS):
        only = f"is not supported, only {', '.join(PROJECTORS)}"
        fields.problems.add(f"{fields.source('projector_type')} {projector!r:.80} {only}")


def _spread_taps(num_draft_layers: int) -> Default:
    """Spread as many outputs as the draft has layers evenly over 1 .. L - 3 (z-lab/dflash)."""

    def boundaries(L: int) -> tuple[int, ...]:
        D = num_draft_layers
        outputs = [round(1 + i * (L - 4) / (D - 1)) for i in range(D)] if D > 1 else [L // 2]
        return tuple(layer + 1 for layer in outputs)

    words = "(one output for each layer of the draft, from 1 to L-3, +1)"
    return Default(boundaries=boundaries, words=words)


def _block_size(sources: Sources, layout: BlockLayout) -> int:
    fields = sources.fields
    if layout.block_size is None and "block_size" not in fields:
        size = fields.need(int, "block_size")
    else:
        size = fields.get(int, "block_size", layout.block_size or 0)
    sources.log.add("block_size", size, fields.source("block_size"))
    return size


def _anchor_proposes(sources: Sources, layout: BlockLayout) -> bool:
    """Whether the row of the last sampled token proposes the one after it, or nothing."""
    keys = ("sample_from_anchor", "shift_label")
    value = sources.fields.find(bool, *keys)
    found = layout.anchor_proposes if value is None else value
    default = f"default of {layout.name}"
    source = default if value is None else sources.fields.source(*keys)
    sources.log.add("anchor_proposes", found, source)
    return found


def _markov(sources: Sources, layout: BlockLayout) -> tuple[Markov | None, int]:
    fields = sources.fields
    rank = sources.number("markov_rank", sources.dims(RANKS), default=layout.markov_rank)
    if rank == 0:
        return None, 0
    kind = fields.get(str, "markov_head_type", "vanilla")
    sources.log.add("markov", kind, fields.source("markov_head_type"))
    if kind not in KINDS:
        only = f"is not supported, only {', '.join(KINDS)}"
        fields.problems.add(f"{fields.source('markov_head_type')} {kind!r:.80} {only}")
    return KINDS.get(kind, "vanilla"), rank


def _confidence(
    sources: Sources, layout: BlockLayout, rank: int
) -> Literal["hidden", "markov"] | None:
    fields = sources.fields
    key = fields.first("enable_confidence_head", "use_confidence_head")
    if not sources.flag("confidence", key, CONFIDENCE, layout.has_confidence):
        return None
    with_markov = fields.get(bool, "confidence_head_with_markov", rank > 0)
    if with_markov and rank == 0:
        what = "there is no markov_head for confidence_head_with_markov"
        fields.problems.add(f"{fields.source('confidence_head_with_markov')}: {what}")
    sources.log.add(
        "confidence_reads",
        "hidden and markov_w1" if with_markov else "hidden",
        fields.source("confidence_head_with_markov"),
    )
    return "markov" if with_markov else "hidden"


def _selector(sources: Sources, defaults: Mapping[str, int]) -> tuple[int, int, int]:
    """Find the size of groups, the selector's rank, and how many tokens of a row it knows."""
    group_size = sources.number("conv_group_size", {}, defaults.get("conv_group_size"))
    rank = sources.number("selector_rank", sources.dims(CODES), defaults.get("selector_rank"))
    return group_size, rank, sources.number("selector_top_k", {}, defaults.get("selector_top_k"))


def _check_selector(
    sources: Sources, group_size: int, D: int, top_k: int, vocabularies: tuple[int, int]
) -> None:
    """Refuse numbers that do not fit the draft, and a selector of some of the target's ids."""
    V, W = vocabularies
    problems = sources.fields.problems
    if group_size and D % group_size:
        line = f"conv_group_size is {group_size}, a divisor of hidden_size, {D}, is needed"
        problems.add(f"{sources.fields.file}: {line}")
    if top_k > W:
        problems.add(f"{sources.fields.file}: selector_top_k is {top_k}, the draft has {W} tokens")
    if W != V or sources.has("d2t"):
        where = sources.where("draft_vocab_size", "d2t")
        problems.add(f"{where}: a selector of some of the target's {V} ids is not supported")
