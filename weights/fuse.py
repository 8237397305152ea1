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
        head, _, kind = name.rpartition(".")
        layer, piece = _split(head)
        whole = _WHOLE.get(piece)
        if whole is None:
            plan[name] = (name,)
        else:
            plan[f"{layer}{whole}.{kind}"] = tuple(f"{layer}{part}.{kind}" for part in FUSED[whole])
    return plan


def _split(head: str) -> tuple[str, str]:
    """ "layers.0.mlp.up_proj" -> ("layers.0.", "mlp.up_proj")."""
    parts = head.split(".")
    if parts[0] == "layers":
        return ".".join(parts[:2]) + ".", ".".join(parts[2:])
    return "", head
