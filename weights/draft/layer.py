"""A draft's decoder layer: sizes from tensor shapes; head counts, eps and rope from its config."""

from weights.config import LayerKind
from weights.draft.sources import Sources
from weights.fields import check_layer
from weights.rope import read_rope, rope_source

ATTENTION = "layers.0.self_attn."
MLP = "layers.0.mlp."

# tensor -> the axis that has the size
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
# field of LayerKind -> tensors that only such a layer has
SWITCHES = {
    "qkv_bias": [f"{ATTENTION}{name}_proj.bias" for name in "qkv"],
    "o_bias": [f"{ATTENTION}o_proj.bias"],
    "mlp_bias": [f"{MLP}{name}_proj.bias" for name in ("gate", "up", "down")],
    "qk_norm": [f"{ATTENTION}{name}_norm.weight" for name in "qk"],
}


def resolve_layer(sources: Sources) -> LayerKind:
    fields = sources.fields
    log = sources.log
    hidden_size = sources.number("hidden_size", sources.dims(HIDDEN_SIZE))
    num_heads = fields.need(int, "num_attention_heads")
    num_kv_heads = fields.get(int, "num_key_value_heads", num_heads)
    mlp_sizes = sources.dims(INTERMEDIATE_SIZE)
    layer = LayerKind(
        hidden_size=hidden_size,
        intermediate_size=sources.number("intermediate_size", mlp_sizes, note_only=True),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(sources, hidden_size, num_heads, num_kv_heads),
        rms_norm_eps=fields.get(float, "rms_norm_eps", 1e-6),
        rope=read_rope(fields),
        qkv_bias=_switch(sources, "qkv_bias"),
        o_bias=_switch(sources, "o_bias"),
        mlp_bias=_switch(sources, "mlp_bias"),
        qk_norm=_switch(sources, "qk_norm"),
    )
    check_layer(layer, _with_file(sources, log.rows["head_dim"].source), fields)
    log.add_read(fields, layer, num_heads="num_attention_heads", num_kv_heads="num_key_value_heads")
    log.add_read(fields, layer, rms_norm_eps="rms_norm_eps")
    log.add("rope", layer.rope, f"{rope_source(fields)} (the draft's own)")
    return layer


def _head_dim(sources: Sources, hidden_size: int, num_heads: int, num_kv_heads: int) -> int:
    """By the tensors: published configs have it wrong (AngelSlim for Qwen3-32B: 80, not 128)."""
    sizes = sources.dims({f"{ATTENTION}{name}_norm.weight": 0 for name in "qk"})
    counts = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads, "o": num_heads}
    for letter, heads in counts.items():
        name = f"{ATTENTION}{letter}_proj.weight"
        width = sources.dim(name, 1 if letter == "o" else 0)
        if width is not None and heads > 0 and width % heads == 0:
            sizes[name] = width // heads
    return sources.number("head_dim", sizes, hidden_size // max(num_heads, 1), note_only=True)


def _with_file(sources: Sources, source: str) -> str:
    """The source of a number, for problems: the shape of a tensor with its file."""
    held = sources.held.get(source.removeprefix("shape of "))
    return source if held is None else f"{held.file.name}: {source}"


def _switch(sources: Sources, field: str) -> bool:
    """By tensors alone: configs copy the target's `attention_bias` though the draft has none."""
    names = SWITCHES[field]
    found = next((name for name in names if sources.has(name)), None)
    sources.log.add(field, found is not None, sources.presence(found or names[0]))
    return found is not None
