"""q, k, v become one product and gate, up another: fewer, larger matrices.

FUSED lists which names of a file make up one name here; weights and biases are concatenated over
rows.
"""

FUSED: dict[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_WHOLE = {piece: whole for whole, pieces in FUSED.items() for piece in pieces}


def fuse_plan(names: list[str]) -> dict[str, tuple[str, ...]]:
    """Fused name -> the names to concatenate, in order; `names` are unfused and complete."""
    plan: dict[str, tuple[str, ...]] = {}
    for name in names:
        piece = next((piece for piece in _WHOLE if f".{piece}." in name), None)
        if piece is None:
            plan[name] = (name,)
        else:
            whole = _WHOLE[piece]
            parts = tuple(name.replace(piece, part) for part in FUSED[whole])
            plan[name.replace(piece, whole)] = parts
    return plan
