"""Drafts: from config.json and tensor shapes to one EagleConfig or BlockConfig, of any format.

The order: format, layer, vocabulary, features, norms, owners; each is logged with its source.
Blocks are in resolve_block.py.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from weights.config import TargetConfig
from weights.draft.config import DraftConfig, EagleConfig
from weights.draft.layer import ATTENTION, resolve_layer
from weights.draft.layouts import MASK_KEYS, ONLY, BlockLayout, Evidence, Layout, find_layout
from weights.draft.norms import resolve_norms
from weights.draft.resolve_block import resolve_block
from weights.draft.sizes import (
    LAYERS,
    check_borrowing,
    mask_token,
    num_layers_of,
    target_hidden_size,
    vocabulary,
)
from weights.draft.sources import EagleSources, Sources
from weights.draft.taps import TAP_KEYS, TapRules, num_taps, resolve_taps
from weights.fields import Fields, layer_types, read_json_object, refuse_values
from weights.files.header import TensorEntry
from weights.files.reader import Reader
from weights.rename import DRAFT_ROWS, MTP_ROWS, rename
from weights.report import Log
from weights.shapes import check_dtypes, file_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """A draft from headers and config alone; copies of the target's tensors are found later."""

    config: DraftConfig
    held: dict[str, TensorEntry]  # by the names of this package

    @property
    def bound(self) -> dict[str, TensorEntry]:
        return {name: entry for name, entry in self.held.items() if name != "t2d"}


def resolve_draft(
    reader: Reader, target: TargetConfig | None, aux_layers: tuple[int, ...] | None, log: Log
) -> Resolution:
    """Resolve the draft in `reader`; raises only if nothing more can be known. See Sources."""
    problems = reader.problems
    raw = read_json_object(reader.directory / "config.json", problems)
    problems.raise_if_fatal()
    fields = Fields(raw, "config.json", problems)
    evidence = Evidence(raw=raw, flat=fields.values, names=frozenset(reader.entries))
    layout = find_layout(evidence, problems)
    fields.strings("architectures")
    refuse_values(fields, ONLY)
    is_inside = isinstance(layout, Layout) and layout.is_inside
    # the target's other tensors are no part of the report
    held = rename(reader, MTP_ROWS, Log()) if is_inside else rename(reader, DRAFT_ROWS, log)
    if "t2d" in held:
        log.ignored[held["t2d"].name] = "a mask used in training; checked against d2t"
    check_dtypes(held, problems)
    problems.raise_if_fatal()
    assert layout is not None, "no layout without a fatal problem"
    log.add("format", layout.name, "config.json and tensor names")
    sources = Sources(held=held, fields=fields, target=target, aux_layers=aux_layers, log=log)
    config: DraftConfig
    if isinstance(layout, BlockLayout):
        config = resolve_block(sources, layout)
    else:
        config = _config(EagleSources.of(sources, layout))
    problems.raise_if_fatal()
    return Resolution(config=config, held=held)


def _config(sources: EagleSources) -> EagleConfig:
    fields = sources.fields
    log = sources.log
    layer = resolve_layer(sources)
    entry = _entry(sources, layer.hidden_size)
    V, W = vocabulary(sources)
    Dt = target_hidden_size(sources, layer.hidden_size)
    has_fc, boundaries = _features(sources, entry, Dt)
    inside = sources.layout.is_inside
    num_layers = num_layers_of(sources, "num_nextn_predict_layers" if inside else LAYERS)
    layer = dataclasses.replace(layer, window=_window(sources, num_layers))
    config = EagleConfig(
        format=sources.layout.name,
        layer=layer,
        num_layers=num_layers,
        vocab_size=V,
        draft_vocab_size=W,
        target_hidden_size=Dt,
        max_position_embeddings=fields.get(int, "max_position_embeddings", 2048),
        aux_boundaries=boundaries,
        entry=entry,
        has_fc=has_fc,
        fc_bias=_fc_bias(sources, entry),
        has_d2t=sources.has("d2t") or W != V,
    )
    config = dataclasses.replace(
        resolve_norms(sources, _parallel(sources, config)),
        has_own_embedding=sources.owns("has_own_embedding", "embed_tokens.weight"),
        has_own_head=sources.owns("has_own_head", "lm_head.weight"),
    )
    log.add_read(fields, config, max_position_embeddings="max_position_embeddings")
    log.add("d2t", "offsets" if sources.has("d2t") else None, sources.presence("d2t"))
    _check_borrowing(config, sources)
    return config


def _parallel(sources: EagleSources, config: EagleConfig) -> EagleConfig:
    """Fill in what P-EAGLE adds."""
    if not sources.layout.is_parallel:
        return config
    if config.entry == "fc":
        sources.fields.add_problem("a P-EAGLE draft without hidden_norm is not supported")
    trained = sources.fields.find(int, "num_depths")
    sources.log.add("trained_drafts", trained, sources.fields.source("num_depths"))
    mask = mask_token(sources, config.vocab_size, *MASK_KEYS)
    return dataclasses.replace(config, mask_token_id=mask, trained_drafts=trained)


def _entry(sources: Sources, hidden_size: int) -> Literal["fc", "qkv"]:
    is_wide = sources.dim(f"{ATTENTION}q_proj.weight", 1) == 2 * hidden_size
    if is_wide or sources.has("layers.0.hidden_norm.weight"):
        source = "q_proj is 2D wide" if is_wide else "layers.0.hidden_norm.weight is there"
        sources.log.add("entry", "qkv", f"{source} (EAGLE-3)")
        return "qkv"
    sources.log.add("entry", "fc", "no hidden_norm, q_proj is D wide (EAGLE-1)")
    return "fc"


def _window(sources: Sources, num_layers: int) -> int | None:
    """Read the window of all layers; the first entries of layer_types are the draft's."""
    fields = sources.fields
    is_sliding = [kind == "sliding_attention" for kind in layer_types(fields)[:num_layers]]
    if any(is_sliding) and not all(is_sliding):
        what = "layers with and without a window are not supported in one draft"
        fields.problems.add(f"{fields.source('layer_types')}: {what}")
    has_window = any(is_sliding) or fields.get(bool, "use_sliding_window", False)
    window = fields.need(int, "sliding_window") if has_window else None
    sources.log.add("sliding_window", window, fields.source("layer_types", "use_sliding_window"))
    return window


def _features(sources: EagleSources, entry: str, Dt: int) -> tuple[bool, tuple[int, ...]]:
    """Whether there is an fc, and which boundaries it reads."""
    fields = sources.fields
    if entry == "fc" or not fields.get(bool, "use_aux_hidden_state", True):
        source = "EAGLE-1" if entry == "fc" else fields.source("use_aux_hidden_state")
        sources.log.add("aux_boundaries", (), f"{source}: the target's hidden after its final norm")
        if sources.aux_layers is not None:
            line = f"aux_layers {sources.aux_layers}: this draft reads none"
            fields.add_problem(f"{line} ({source})")
        sources.ignore("this draft reads the target's hidden after its final norm", *TAP_KEYS)
        return entry == "fc" or sources.has("fc.weight"), ()
    return True, resolve_taps(sources, TapRules(format=sources.layout), num_taps(sources, Dt))


def _fc_bias(sources: Sources, entry: str) -> bool:
    # some engines read `bias` of an EAGLE-3 config as the attention's
    keys = ("eagle_fc_bias", "fusion_bias", "bias") if entry == "fc" else ("fusion_bias",)
    return sources.flag("fc_bias", sources.fields.first(*keys), "fc.bias")


def _check_borrowing(config: EagleConfig, sources: Sources) -> None:
    check_borrowing(config, sources)
    D, Dt = config.layer.hidden_size, config.target_hidden_size
    if config.entry == "fc" and Dt != D:
        sources.fields.add_problem(
            f"an EAGLE-1 draft of hidden size {D} for a target of {Dt}: fc reads the hidden states "
            "of both models, so they must have one size"
        )
    if not config.has_fc and Dt != D:
        line = f"no fc: a draft of hidden size {D} cannot read the target's hidden of {Dt}"
        sources.fields.problems.add(f"{file_names(sources.held)}: {line}")
