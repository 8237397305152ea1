"""From the loader's names to those of files: pieces, offsets, copies, prefixes, config keys."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from weights import EagleConfig, LayerKind, LoadedTarget, RopeConfig
from weights.arrange import arrange

Tensors = dict[str, Tensor]
Json = dict[str, object]
LENGTH = "original_max_position_embeddings"


def unfuse(layer: LayerKind, tensors: Tensors) -> Tensors:
    """Split qkv_proj and gate_up_proj by rows; everything else as it is."""
    query = layer.num_heads * layer.head_dim
    kv = layer.num_kv_heads * layer.head_dim
    mlp = layer.intermediate_size
    parts = {
        "qkv_proj": (("q_proj", query), ("k_proj", kv), ("v_proj", kv)),
        "gate_up_proj": (("gate_proj", mlp), ("up_proj", mlp)),
    }
    pieces: Tensors = {}
    for name, tensor in tensors.items():
        whole = next((whole for whole in parts if f".{whole}." in name), None)
        if whole is None:
            pieces[name] = tensor.clone()
            continue
        rows = tensor.split([size for _, size in parts[whole]])
        pieces |= {
            name.replace(whole, part): row.clone()
            for (part, _), row in zip(parts[whole], rows, strict=True)
        }
    return pieces


def arranged(pieces: Tensors) -> Tensors:
    """The tensors of a load from those of files."""
    plan = arrange({name: tuple(piece.shape) for name, piece in pieces.items()})
    tensors = plan.empty(next(iter(pieces.values())).dtype, "cpu")
    for name, view in plan.pieces(tensors).items():
        view.copy_(pieces[name])
    return tensors


def with_offsets(pieces: Tensors, vocab_size: int, mask: bool = True) -> Tensors:
    """d2t as the offsets that files hold, with t2d."""
    if "d2t" not in pieces:
        return pieces
    ids = pieces["d2t"]
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return pieces | {"d2t": ids - torch.arange(len(ids))} | ({"t2d": t2d} if mask else {})


def with_copies(pieces: Tensors, target: LoadedTarget, embedding: bool, head: bool) -> Tensors:
    """Copies of what the draft borrows, where the format saves it anyway."""
    theirs = target.tensors
    if embedding:
        pieces = {"embed_tokens.weight": theirs["embed_tokens.weight"].clone()} | pieces
    if head:
        copy = theirs.get("lm_head.weight", theirs["embed_tokens.weight"]).clone()
        pieces = {"lm_head.weight": copy} | pieces
    return pieces


def renamed(pieces: Tensors, prefixes: dict[str, str]) -> Tensors:
    """Replace the first prefix that fits each name."""
    table: Tensors = {}
    for name, tensor in pieces.items():
        old = next((old for old in prefixes if name.startswith(old)), "")
        table[prefixes.get(old, "") + name[len(old) :]] = tensor
    return table


def midlayers(config: EagleConfig, pieces: Tensors) -> Tensors:
    if config.num_layers == 1:
        return renamed(pieces, {"layers.0.": "midlayer."})
    return {name.replace("layers.", "midlayers.", 1): tensor for name, tensor in pieces.items()}


def rope_keys(rope: RopeConfig, new: bool) -> Json:
    """`rope_parameters` of transformers 5, or `rope_theta` with `rope_scaling`."""
    keys = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", LENGTH, "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", LENGTH, "beta_fast", "beta_slow"),
    }[rope.kind]
    scaled = {"rope_type": rope.kind} | {key: getattr(rope, key) for key in keys}
    if new:
        return {"rope_parameters": scaled | {"rope_theta": rope.theta}}
    return {"rope_theta": rope.theta, "rope_scaling": scaled if rope.kind != "default" else None}


def layer_keys(config: EagleConfig, new_rope: bool = False) -> Json:
    layer = config.layer
    return {
        "model_type": "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.rms_norm_eps,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        **rope_keys(layer.rope, new_rope),
    }


def save(directory: Path, config: Json, pieces: Tensors) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in pieces.items()}
    save_file(contiguous, directory / "model.safetensors")


def window_keys(config: EagleConfig) -> Json:
    if config.layer.window is None:
        return {}
    return {
        "sliding_window": config.layer.window,
        "layer_types": ["sliding_attention"] * config.num_layers,
    }


def target_width(config: EagleConfig) -> Json:
    is_same = config.target_hidden_size == config.layer.hidden_size
    return {} if is_same else {"target_hidden_size": config.target_hidden_size}
