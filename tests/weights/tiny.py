"""Tiny targets and drafts in memory, and on disk as transformers would save the target."""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.weights.pieces import arranged, rope_keys, unfuse
from weights import BindingReport, EagleConfig, LayerKind, LoadedTarget, RopeConfig, TargetConfig
from weights.draft.config import DraftConfig
from weights.families.table import FAMILIES
from weights.shapes import Shapes, draft_shapes, target_shapes

BIASES = {
    "llama": (False, False, False),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "mimo": (True, False, False),
    "qwen3": (False, False, True),
    "granite": (False, False, False),
}

LAYER = LayerKind(
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
)


def tiny_target(
    model_type: str = "llama", *, has_tied_head: bool = False, dtype: str = "float32"
) -> LoadedTarget:
    """A target with random weights, as if loaded; V 96, L 8, D 32."""
    qkv_bias, o_bias, qk_norm = BIASES[model_type]
    kind = dataclasses.replace(LAYER, qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm)
    if FAMILIES[model_type].has_multipliers:
        kind = dataclasses.replace(kind, attention_scale=0.2, residual_multiplier=0.7)
    config = TargetConfig(
        model_type=model_type,
        layers=(kind,) * 8,
        vocab_size=96,
        max_position_embeddings=256,
        has_tied_head=has_tied_head,
        dtype=dtype,
        bos_token_id=0,
        eos_token_ids=(1,),
    )
    tensors = random_tensors(target_shapes(config), seed=0, dtype=getattr(torch, dtype))
    return LoadedTarget(
        config=config,
        tensors=tensors,
        report=BindingReport(directory=Path(), role="", format="", fields=()),
    )


def write_target(
    directory: Path, target: LoadedTarget, num_shards: int = 1, **changes: object
) -> None:
    """The directory that transformers would save; `changes` overwrite keys of config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    keys = target_keys(target.config) | changes
    (directory / "config.json").write_text(json.dumps(keys))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    pieces = {
        name if name == "lm_head.weight" else f"model.{name}": tensor
        for name, tensor in unfuse(target.config.layers[0], target.tensors).items()
    }
    if num_shards == 1:
        save_file(pieces, directory / "model.safetensors")
        return
    names, weight_map = sorted(pieces), {}
    for i in range(num_shards):
        shard = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: pieces[name] for name in names[i::num_shards]}, directory / shard)
        weight_map |= dict.fromkeys(names[i::num_shards], shard)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def target_keys(config: TargetConfig) -> dict[str, object]:
    layer = config.layers[0]
    return {
        "architectures": [FAMILIES[config.model_type].architecture],
        "model_type": config.model_type,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.has_tied_head,
        "hidden_act": "silu",
        "sliding_window": layer.window,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": 1,
        "attention_bias": layer.o_bias,
        "attention_multiplier": layer.attention_scale,
        "residual_multiplier": layer.residual_multiplier,
        **rope_keys(layer.rope, new=True),
    }


def eagle3_config(target: LoadedTarget, **changes: object) -> EagleConfig:
    """A reference EAGLE-3 draft for `target`; `changes` of LayerKind's fields go to its layer."""
    base = EagleConfig(
        format="any",
        layer=dataclasses.replace(LAYER, hidden_size=target.config.hidden_size, head_dim=8),
        num_layers=1,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=40,
        target_hidden_size=target.config.hidden_size,
        max_position_embeddings=64,
        aux_boundaries=(2, 4, 5),
        entry="qkv",
        has_fc=True,
        has_d2t=True,
    )
    return _changed(base, changes)


def eagle1_config(target: LoadedTarget, **changes: object) -> EagleConfig:
    """A reference EAGLE-1 draft for `target`: no norms, the target's head."""
    base = dataclasses.replace(
        eagle3_config(target),
        draft_vocab_size=target.config.vocab_size,
        aux_boundaries=(),
        entry="fc",
        fc_bias=True,
        has_input_layernorm=False,
        has_final_norm=False,
        has_own_head=False,
        has_d2t=False,
    )
    return _changed(base, changes)


def _changed(config: EagleConfig, changes: dict[str, object]) -> EagleConfig:
    of_layer = {field.name for field in dataclasses.fields(LayerKind)}
    layer = dataclasses.replace(
        config.layer, **{key: value for key, value in changes.items() if key in of_layer}
    )
    return dataclasses.replace(
        config, layer=layer, **{key: value for key, value in changes.items() if key not in of_layer}
    )


def draft_tensors(
    config: DraftConfig, seed: int = 1, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random weights under the loader's names; d2t distinct target ids, ascending."""
    shapes = {name: shape for name, shape in draft_shapes(config).items() if name != "d2t"}
    tensors = random_tensors(shapes, seed, dtype)
    if config.has_d2t:
        order = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(seed))
        tensors["d2t"] = order[: config.draft_vocab_size].sort().values
    return tensors


def random_tensors(shapes: Shapes, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pieces = {
        name: (torch.randn(shape, generator=generator) * 0.1).to(dtype)
        for name, shape in shapes.items()
    }
    return arranged(pieces)
