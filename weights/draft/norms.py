"""The norms around a draft's layer and what it recycles; keys and defaults are in layouts.py."""

import dataclasses
from typing import Literal

from weights.draft.config import EagleConfig
from weights.draft.sources import EagleSources

FIRST_NORM = "layers.0.input_layernorm.weight"


def resolve_norms(sources: EagleSources, config: EagleConfig) -> EagleConfig:
    """`config` with its norms filled in."""
    resolved = (_entry_fc if config.entry == "fc" else _entry_qkv)(sources, config)
    if resolved.norm_before_fc and resolved.has_fc_norm:
        sources.fields.add_problem("norm_before_fc (input_norm) and fc_norm exclude each other")
    return resolved


def _entry_fc(sources: EagleSources, config: EagleConfig) -> EagleConfig:
    """EAGLE-1 has no norms; speculators' `layernorms` switches three on together. MTP has four."""
    is_mtp = sources.layout.is_inside
    needed = True if is_mtp else None
    has_final_norm = sources.flag("has_final_norm", "layernorms", "norm.weight", needed)
    absent = ("norm_before_fc", "fc_norm", "norm_before_residual")
    sources.ignore("an EAGLE-1 draft has no such norm", *absent)
    embed_norm, feature_norm = "embed_norm.weight", "feature_norm.weight"
    return dataclasses.replace(
        config,
        has_embed_norm=sources.flag("has_embed_norm", "layernorms", embed_norm, needed),
        has_feature_norm=is_mtp and sources.flag("has_feature_norm", None, feature_norm, needed),
        has_input_layernorm=sources.flag("has_input_layernorm", "layernorms", FIRST_NORM, needed),
        has_final_norm=has_final_norm,
        recycled=_recycled(sources, has_final_norm),
    )


def _entry_qkv(sources: EagleSources, config: EagleConfig) -> EagleConfig:
    first = "use_input_layernorm_in_first_layer"
    last = sources.layout.final_norm_key
    has_final_norm = sources.flag("has_final_norm", last, "norm.weight", default=True)
    return dataclasses.replace(
        config,
        norm_before_fc=sources.flag("norm_before_fc", "norm_before_fc", "input_norm.weight"),
        has_fc_norm=sources.flag("has_fc_norm", "fc_norm", "fc_norm.0.weight"),
        has_input_layernorm=sources.flag("has_input_layernorm", first, FIRST_NORM, default=True),
        norm_before_residual=_norm_before_residual(sources),
        has_final_norm=has_final_norm,
        recycled=_recycled(sources, has_final_norm),
    )


def _norm_before_residual(sources: EagleSources) -> bool:
    key = "norm_before_residual"
    value = sources.fields.get(bool, key, sources.layout.norm_before_residual)
    default = f"default of {sources.layout.name}"
    sources.log.add(key, value, sources.fields.source(key) if key in sources.fields else default)
    return value


def _recycled(sources: EagleSources, has_final_norm: bool) -> Literal["pre_norm", "post_norm"]:
    fields = sources.fields
    layout = sources.layout
    log = sources.log
    keys = layout.recycled_keys
    if layout.is_parallel:
        sources.ignore("a P-EAGLE draft recycles nothing", *keys)
        return "pre_norm"
    if layout.recycles_norm and has_final_norm:
        log.add("recycled", "post_norm", f"{layout.name}: the head reads what is recycled")
        return "post_norm"
    if "norm_output" in fields and "norm_output" not in keys:
        meaning = "a norm before lm_head; the hidden is recycled pre_norm"
        log.note(f"norm_output in a {layout.name} head: {meaning}")
    key = None
    if has_final_norm:
        key = next((key for key in keys if fields.find(bool, key)), None)
    else:
        sources.ignore("this draft has no norm after its layers", *keys)
    value: Literal["pre_norm", "post_norm"] = "post_norm" if key else "pre_norm"
    log.add("recycled", value, fields.source(key) if key else fields.source(*keys))
    return value
