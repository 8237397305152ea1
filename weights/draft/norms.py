"""The norms around a draft's layer and what it recycles; keys and defaults per format are in layouts.py."""

from dataclasses import dataclass
from typing import Literal

from weights.draft.layouts import Layout
from weights.draft.sources import Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Fields of EagleConfig, by the same names."""

    norm_before_fc: bool
    has_fc_norm: bool
    has_embed_norm: bool
    has_input_layernorm: bool
    norm_before_residual: bool
    has_final_norm: bool
    recycled: Literal["pre_norm", "post_norm"]


def resolve_norms(sources: Sources, layout: Layout, entry: str) -> Norms:
    resolved = _entry_fc(sources, layout) if entry == "fc" else _entry_qkv(sources, layout)
    if resolved.norm_before_fc and resolved.has_fc_norm:
        sources.problems.add(
            f"{sources.fields.file}: norm_before_fc (input_norm) and fc_norm exclude each other"
        )
    return resolved


def _entry_fc(sources: Sources, layout: Layout) -> Norms:
    """EAGLE-1 has none; speculators' `layernorms` switches three on together."""
    has_final_norm = sources.flag("has_final_norm", "layernorms", "norm.weight")
    sources.ignore(
        "an EAGLE-1 draft has no such norm", "norm_before_fc", "fc_norm", "norm_before_residual"
    )
    return Norms(
        norm_before_fc=False,
        has_fc_norm=False,
        has_embed_norm=sources.flag("has_embed_norm", "layernorms", "embed_norm.weight"),
        has_input_layernorm=sources.flag(
            "has_input_layernorm", "layernorms", "layers.0.input_layernorm.weight"
        ),
        norm_before_residual=False,
        has_final_norm=has_final_norm,
        recycled=_recycled(sources, layout, has_final_norm),
    )


def _entry_qkv(sources: Sources, layout: Layout) -> Norms:
    first, last = "use_input_layernorm_in_first_layer", layout.final_norm_key
    has_final_norm = sources.flag("has_final_norm", last, "norm.weight", default=True)
    return Norms(
        norm_before_fc=sources.flag("norm_before_fc", "norm_before_fc", "input_norm.weight"),
        has_fc_norm=sources.flag("has_fc_norm", "fc_norm", "fc_norm.0.weight"),
        has_embed_norm=False,
        has_input_layernorm=sources.flag(
            "has_input_layernorm", first, "layers.0.input_layernorm.weight", default=True
        ),
        norm_before_residual=_norm_before_residual(sources, layout),
        has_final_norm=has_final_norm,
        recycled=_recycled(sources, layout, has_final_norm),
    )


def _norm_before_residual(sources: Sources, layout: Layout) -> bool:
    value = sources.fields.get(bool, "norm_before_residual", layout.norm_before_residual)
    source = sources.fields.source("norm_before_residual")
    sources.log.add(
        "norm_before_residual",
        value,
        f"default of {layout.name}" if source == "default" else source,
    )
    return value


def _recycled(
    sources: Sources, layout: Layout, has_final_norm: bool
) -> Literal["pre_norm", "post_norm"]:
    fields, log = sources.fields, sources.log
    if layout.recycles_norm and has_final_norm:
        log.add("recycled", "post_norm", f"{layout.name}: the head reads what is recycled")
        return "post_norm"
    if "norm_output" in fields and "norm_output" not in layout.recycled_keys:
        log.note(
            f"norm_output in a {layout.name} head: a norm before lm_head; the hidden is recycled pre_norm"
        )
    if not has_final_norm:
        sources.ignore("this draft has no norm behind its layers", *layout.recycled_keys)
    asked = (key for key in layout.recycled_keys if fields.find(bool, key))
    key = next(asked, None) if has_final_norm else None
    source = fields.source(key or next((key for key in layout.recycled_keys if key in fields), ""))
    log.add("recycled", "post_norm" if key else "pre_norm", source)
    return "post_norm" if key else "pre_norm"
