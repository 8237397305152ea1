"""The decoder layer of a draft: sizes from tensor shapes; head counts, eps and rope from its own config."""

from weights.config import LayerConfig
from weights.draft.sources import Sources
from weights.fields import check_layer
from weights.rope import read_rope, rope_source

ATTENTION = "layers.0.self_attn."
MLP = "layers.0.mlp."

# tensor -> the axis that tells the size
HIDDEN_SIZE = {
    "layers.0.post_attention_layernorm.weight": 0,
    f"{ATTENTION}o_proj.weight": 0,
    f"{MLP}down_proj.weight": 0,
    "fc.weight": 0,
}
INTERMEDIATE_SIZE = {
    f"{MLP}down_proj.weight": 1,
    f"{MLP}gate_proj.weight": 0,
    f"{MLP}up_proj.weight": 0,
}


def resolve_layer(sources: Sources) -> LayerConfig:
    fields = sources.fields
    hidden_size = sources.number("hidden_size", "hidden_size", sources.dims(HIDDEN_SIZE))
    num_heads = fields.need(int, "num_attention_heads")
    num_kv_heads = fields.get(int, "num_key_value_heads", num_heads)
    layer = LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=sources.number(
            "intermediate_size",
            "intermediate_size",
            sources.dims(INTERMEDIATE_SIZE),
            is_unreliable=True,
        ),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(sources, hidden_size, num_heads, num_kv_heads),
        rms_norm_eps=fields.get(float, "rms_norm_eps", 1e-6),
        rope=read_rope(fields, sources.problems),
        qkv_bias=_built(
            sources, "qkv_bias", tuple(f"{ATTENTION}{name}_proj.bias" for name in "qkv")
        ),
        o_bias=_built(sources, "o_bias", (f"{ATTENTION}o_proj.bias",)),
        mlp_bias=_built(
            sources, "mlp_bias", tuple(f"{MLP}{name}_proj.bias" for name in ("gate", "up", "down"))
        ),
        qk_norm=_built(
            sources, "qk_norm", tuple(f"{ATTENTION}{name}_norm.weight" for name in "qk")
        ),
    )
    check_layer(layer, sources.log.rows["head_dim"].source, fields)
    _log(sources, layer)
    return layer


def _head_dim(sources: Sources, hidden_size: int, num_heads: int, num_kv_heads: int) -> int:
    """Published configs have it wrong (AngelSlim for Qwen3-32B says 80, the tensors 128)."""
    places = sources.dims({f"{ATTENTION}{name}_norm.weight": 0 for name in "qk"})
    rows = (
        ("q_proj", 0, num_heads),
        ("k_proj", 0, num_kv_heads),
        ("v_proj", 0, num_kv_heads),
        ("o_proj", 1, num_heads),
    )
    for name, axis, heads in rows:
        width = sources.dim(f"{ATTENTION}{name}.weight", axis)
        if width is not None and heads > 0 and width % heads == 0:
            places[f"{ATTENTION}{name}.weight"] = width // heads
    return sources.number(
        "head_dim", "head_dim", places, hidden_size // max(num_heads, 1), is_unreliable=True
    )


def _built(sources: Sources, field: str, names: tuple[str, ...]) -> bool:
    """Told by the tensors alone: trainers copy `attention_bias` from the target's config and build none."""
    found = next((name for name in names if sources.has(name)), None)
    sources.log.add(
        field, found is not None, f"{found} is there" if found else f"{names[0]} is absent"
    )
    return found is not None


def _log(sources: Sources, layer: LayerConfig) -> None:
    fields, log = sources.fields, sources.log
    log.add("num_heads", layer.num_heads, fields.source("num_attention_heads"))
    log.add("num_kv_heads", layer.num_kv_heads, fields.source("num_key_value_heads"))
    log.add("rms_norm_eps", layer.rms_norm_eps, fields.source("rms_norm_eps"))
    log.add("rope", layer.rope, f"{rope_source(fields)} (the draft's own)")
