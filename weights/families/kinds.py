"""The layers of a target, from its config.json and the row of its family."""

import dataclasses
from collections.abc import Mapping

from weights.config import LayerKind
from weights.families.experts import check_count, have_experts, read_experts
from weights.families.family import Family
from weights.families.windows import read_windows
from weights.fields import Fields, check_layer
from weights.quantisation import with_forms
from weights.report import Log
from weights.rope import read_rope, rope_source


def read_layers(
    fields: Fields,
    family: Family,
    num_layers: int,
    num_tensors: int,
    log: Log,
    names: Mapping[str, str],
) -> tuple[LayerKind, ...]:
    """Read the kind of each layer; those that are alike share it.

    num_tensors: in the files; more experts than these are not even named
    names:       of modules in files, by ours; see with_forms
    """
    kinds = _read_kinds(fields, family, num_layers, num_tensors, log)
    each = tuple(zip(kinds, read_windows(fields, family, num_layers, log), strict=True))
    shared = {(kind, window): dataclasses.replace(kind, window=window) for kind, window in each}
    layers = tuple(shared[pair] for pair in each)
    return layers if fields.problems.is_fatal else with_forms(layers, fields, family, names, log)


def _read_kinds(
    fields: Fields, family: Family, num_layers: int, num_tensors: int, log: Log
) -> tuple[LayerKind, ...]:
    """Read all but their windows."""
    row = family.experts
    if row is None:
        return (_read_kind(fields, family, log, is_dense=True),) * num_layers
    is_sparse = have_experts(fields, row, num_layers, log)
    base = _read_kind(fields, family, log, is_dense=not all(is_sparse))
    experts = read_experts(fields, row, log)
    check_count(fields, experts, sum(is_sparse), num_tensors)
    sparse = dataclasses.replace(base, intermediate_size=0, experts=experts)
    return tuple(sparse if each else base for each in is_sparse)


def _read_kind(fields: Fields, family: Family, log: Log, is_dense: bool) -> LayerKind:
    """Read what all layers have in common, and the width of the MLP if some layer has one."""
    hidden_size = fields.need(int, "hidden_size")
    num_heads = fields.need(int, "num_attention_heads")
    head_dim = family.head_dim or hidden_size // max(num_heads, 1)
    has_multipliers = family.has_multipliers
    kind = LayerKind(
        hidden_size=hidden_size,
        intermediate_size=fields.need(int, "intermediate_size") if is_dense else 0,
        num_heads=num_heads,
        num_kv_heads=fields.get(int, "num_key_value_heads", num_heads),
        head_dim=fields.get(int, "head_dim", head_dim),
        rms_norm_eps=fields.get(float, "rms_norm_eps", family.rms_norm_eps),
        rope=read_rope(fields, family.rope_theta, family.rope),
        qkv_bias=_switch(fields, family, family.qkv_bias),
        o_bias=_switch(fields, family, family.o_bias),
        mlp_bias=_switch(fields, family, family.mlp_bias),
        qk_norm=family.qk_norm,
        has_sinks=family.has_sinks,
        attention_scale=_multiplier(fields, "attention_multiplier") if has_multipliers else None,
        residual_multiplier=_multiplier(fields, "residual_multiplier") if has_multipliers else 1.0,
    )
    check_layer(kind, fields.source("head_dim"), fields)
    log.add_read(fields, kind, hidden_size="hidden_size")
    if is_dense:
        log.add_read(fields, kind, intermediate_size="intermediate_size")
    log.add_read(fields, kind, num_heads="num_attention_heads", num_kv_heads="num_key_value_heads")
    log.add_read(fields, kind, head_dim="head_dim", rms_norm_eps="rms_norm_eps")
    log.add("rope", kind.rope, rope_source(fields))
    for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
        switch = getattr(family, name)
        source = fields.source(switch) if isinstance(switch, str) else "the model family"
        log.add(name, getattr(kind, name), source)
    if has_multipliers:
        log.add_read(fields, kind, attention_scale="attention_multiplier")
        log.add_read(fields, kind, residual_multiplier="residual_multiplier")
    return kind


def _switch(fields: Fields, family: Family, switch: bool | str) -> bool:
    if isinstance(switch, str):
        return fields.get(bool, switch, family.bias_default)
    return switch


def _multiplier(fields: Fields, key: str) -> float:
    return fields.get(float, key, 1.0)
