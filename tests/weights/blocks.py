"""Tiny block drafts, and the public formats that they are written in: the loader's inverse.

`FORMATS[name]` has `can_express(config, target)` and `write(directory, config, tensors, target)`,
as those of EAGLE drafts in formats.py have; names are those of the formats' public modules.
"""

import dataclasses
from pathlib import Path

from tests.weights.formats import Format, speculators_keys
from tests.weights.pieces import (
    Json,
    Tensors,
    rope_keys,
    save,
    target_width,
    unfuse,
    with_copies,
    with_offsets,
)
from tests.weights.tiny import LAYER
from weights import BlockConfig, LayerKind, LoadedTarget

FULL = {"has_d2t": False, "draft_vocab_size": 96, "has_own_head": False}
DFLASH2 = {"conv_group_size": 8, "selector_rank": 12, "selector_top_k": 5}
DSPARK = {"anchor_proposes": True, "markov": "vanilla", "markov_rank": 12, "confidence": "markov"}


def block_config(target: LoadedTarget, **changes: object) -> BlockConfig:
    """A DFlash draft: 2 layers, blocks of 6; `changes` of LayerKind's fields go to its layers."""
    D, V = target.config.hidden_size, target.config.vocab_size
    layer = dataclasses.replace(LAYER, hidden_size=D, head_dim=8, qk_norm=True)
    base = BlockConfig(
        format="any",
        layer=layer,
        num_layers=2,
        vocab_size=V,
        draft_vocab_size=V,
        target_hidden_size=D,
        max_position_embeddings=256,
        aux_boundaries=(2, 5),
        block_size=6,
        mask_token_id=V - 3,
        anchor_proposes=False,
    )
    of_layer = {field.name for field in dataclasses.fields(LayerKind)}
    layer = dataclasses.replace(layer, **{k: v for k, v in changes.items() if k in of_layer})
    others = {key: value for key, value in changes.items() if key not in of_layer}
    return dataclasses.replace(base, layer=layer, **others)


def layer_keys(config: BlockConfig) -> Json:
    layer = config.layer
    return {
        "model_type": "qwen3",
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
        "attention_bias": layer.qkv_bias,
        "layer_types": ["full_attention"] * config.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        **rope_keys(layer.rope, new=False),
    }


def pieces_of(config: BlockConfig, tensors: Tensors) -> Tensors:
    """The tensors by the names of all public modules."""
    names = {f"markov_head.{name}.": f"markov_head.{name}_proj." for name in ("gate", "joint")}
    pieces = {}
    for name, tensor in unfuse(config.layer, tensors).items():
        old = next((old for old in names if name.startswith(old)), "")
        pieces[names.get(old, "") + name[len(old) :]] = tensor
    return pieces


def heads_keys(config: BlockConfig) -> Json:
    keys: Json = {
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence is not None,
    }
    if config.markov is not None:
        keys["markov_head_type"] = config.markov
    if config.confidence is not None:
        keys["confidence_head_with_markov"] = config.confidence == "markov"
    return keys


def selector_keys(config: BlockConfig) -> Json:
    return {key: getattr(config, key) for key in DFLASH2}


def has_heads(config: BlockConfig) -> bool:
    return config.markov is not None or config.confidence is not None


def write_zlab(
    directory: Path, config: BlockConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """z-lab/dflash, and SpecForge's DFlash: neither embedding nor head."""
    ids = [boundary - 1 for boundary in config.aux_boundaries]
    own = {"mask_token_id": config.mask_token_id, "target_layer_ids": ids}
    keys = {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "num_target_layers": target.config.num_layers,
        "dflash_config": own | ({"shift_label": True} if config.anchor_proposes else {}),
    }
    save(directory, layer_keys(config) | keys, pieces_of(config, tensors))


def write_zlab2(
    directory: Path, config: BlockConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """DFlash2 of z-lab/dflash and SpecForge: all options in dflash_config, as published."""
    own = {
        "block_size": config.block_size,
        "conv_kernel_size": 2,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [boundary - 1 for boundary in config.aux_boundaries],
        **selector_keys(config),
    }
    keys = {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "num_target_layers": target.config.num_layers,
        "dflash_config": own,
    }
    save(directory, layer_keys(config) | keys, pieces_of(config, tensors))


def write_specforge(
    directory: Path, config: BlockConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """All options in dflash_config."""
    own = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [boundary - 1 for boundary in config.aux_boundaries],
        "projector_type": "dspark",
        "confidence_head_alpha": 1.0,
        "causal": False,
        **({} if config.anchor_proposes else {"shift_label": False}),
        **heads_keys(config),
    }
    keys = {
        "architectures": ["DSparkDraftModel"],
        "block_size": config.block_size,
        "num_target_layers": target.config.num_layers,
        "dflash_config": own,
    }
    save(directory, layer_keys(config) | keys, pieces_of(config, tensors))


def write_deepspec(
    directory: Path, config: BlockConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """All options at the top; copies of the target's embedding and head."""
    pieces = with_copies(
        pieces_of(config, tensors),
        target,
        embedding=not config.has_own_embedding,
        head=not config.has_own_head,
    )
    keys = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [boundary - 1 for boundary in config.aux_boundaries],
        "num_anchors": 512,
        "num_target_layers": target.config.num_layers,
        **heads_keys(config),
    }
    save(directory, layer_keys(config) | keys, pieces)


def write_speculators(
    directory: Path, config: BlockConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """Silent where its defaults say it; a reduced vocabulary has a head of its own."""
    kind = "dspark" if has_heads(config) else "dflash2" if config.selector_rank else "dflash"
    pieces = with_offsets(pieces_of(config, tensors), config.vocab_size)
    keys = {
        "architectures": [f"{kind}Speculator"],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": list(config.aux_boundaries),
        "draft_vocab_size": config.draft_vocab_size,
        "sliding_window_non_causal": False,
        **target_width(config),
    }
    if config.anchor_proposes != (kind == "dspark"):
        keys["sample_from_anchor"] = config.anchor_proposes
    if kind == "dspark" and (config.markov_rank != 256 or config.confidence != "markov"):
        keys |= heads_keys(config)
    if kind == "dflash2":
        defaults = {"conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
        keys |= {k: n for k, n in selector_keys(config).items() if n != defaults[k]}
    save(directory, speculators_keys(kind, config, layer_keys(config)) | keys, pieces)


def is_plain(config: BlockConfig) -> bool:
    return not (config.has_own_head or config.has_own_embedding or config.has_d2t)


FORMATS: dict[str, Format] = {
    "dflash": Format(
        can_express=lambda config, target: is_plain(config) and config.method == "dflash",
        write=write_zlab,
    ),
    "dflash2": Format(
        can_express=lambda config, target: (
            is_plain(config) and config.method == "dflash2" and not config.anchor_proposes
        ),
        write=write_zlab2,
    ),
    "specforge-dspark": Format(
        can_express=lambda config, target: is_plain(config) and has_heads(config),
        write=write_specforge,
    ),
    "deepspec-dspark": Format(
        can_express=lambda config, target: (
            config.anchor_proposes and not config.has_d2t and not config.selector_rank
        ),
        write=write_deepspec,
    ),
    "speculators": Format(can_express=lambda config, target: True, write=write_speculators),
}
