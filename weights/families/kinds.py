"""The layers of a target, from its config.json and the row of its family."""

from weights.config import LayerKind
from weights.families.family import Family
from weights.fields import Fields, check_layer
from weights.report import Log
from weights.rope import read_rope, rope_source


def read_layers(fields: Fields, family: Family, num_layers: int, log: Log) -> tuple[LayerKind, ...]:
    """Read the kind of each layer; those that are alike share it."""
    return (_read_kind(fields, family, log),) * num_layers


def _read_kind(fields: Fields, family: Family, log: Log) -> LayerKind:
    hidden_size = fields.need(int, "hidden_size")
    num_heads = fields.need(int, "num_attention_heads")
    head_dim = family.head_dim or hidden_size // max(num_heads, 1)
    layer = LayerKind(
        hidden_size=hidden_size,
        intermediate_size=fields.need(int, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.get(int, "num_key_value_heads", num_heads),
        head_dim=fields.get(int, "head_dim", head_dim),
        rms_norm_eps=fields.get(float, "rms_norm_eps", 1e-6),
        rope=read_rope(fields),
        qkv_bias=_switch(fields, family.qkv_bias),
        o_bias=_switch(fields, family.o_bias),
        mlp_bias=_switch(fields, family.mlp_bias),
        qk_norm=family.qk_norm,
    )
    check_layer(layer, fields.source("head_dim"), fields)
    log.add_read(fields, layer, hidden_size="hidden_size", intermediate_size="intermediate_size")
    log.add_read(fields, layer, num_heads="num_attention_heads", num_kv_heads="num_key_value_heads")
    log.add_read(fields, layer, head_dim="head_dim", rms_norm_eps="rms_norm_eps")
    log.add("rope", layer.rope, rope_source(fields))
    for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
        switch = getattr(family, name)
        source = fields.source(switch) if isinstance(switch, str) else "the model family"
        log.add(name, getattr(layer, name), source)
    return layer


def _switch(fields: Fields, switch: bool | str) -> bool:
    return fields.get(bool, switch, False) if isinstance(switch, str) else switch
