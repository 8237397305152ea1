"""The same draft written in every format that can express it: the inverse of the loader.

`FORMATS[name]` has `can_express(config, target)` and `write(directory, config, tensors, target)`.
`tensors` have the loader's names (fused, d2t absolute, borrowed tensors absent); `target` is a
LoadedTarget whose tensors are copied where a format always saves embedding or head. Used here for
round trips, and by tests/specdec for identical logits.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.weights.pieces import (
    Json,
    Tensors,
    layer_keys,
    midlayers,
    renamed,
    save,
    target_width,
    unfuse,
    window_keys,
    with_copies,
    with_offsets,
)
from tests.weights.tiny import write_target
from weights import EagleConfig, LoadedTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    can_express: Callable[[EagleConfig, LoadedTarget], bool]
    write: Callable[[Path, EagleConfig, Tensors, LoadedTarget], None]


# --- what formats cannot say


def default_taps(target: LoadedTarget) -> tuple[int, ...]:
    L = target.config.num_layers
    return (2, L // 2, L - 3)


def is_eagle1(config: EagleConfig) -> bool:
    is_mtp = config.has_feature_norm
    return config.entry == "fc" and not config.has_d2t and not is_fancy(config) and not is_mtp


def is_plain1(config: EagleConfig) -> bool:
    norms = config.has_embed_norm or config.has_input_layernorm or config.has_final_norm
    return is_eagle1(config) and not norms and config.recycled == "pre_norm"


def is_fancy(config: EagleConfig) -> bool:
    """What only the newest trainers write."""
    return (
        config.layer.o_bias
        or config.layer.mlp_bias
        or config.layer.qk_norm
        or config.layer.window is not None
    )


def is_eagle3(config: EagleConfig) -> bool:
    is_whole = (
        config.has_fc
        and config.has_input_layernorm
        and config.has_final_norm
        and not config.fc_bias
    )
    return config.entry == "qkv" and is_whole and bool(config.aux_boundaries)


def is_plain3(config: EagleConfig) -> bool:
    """No flag of any kind, as of 2025."""
    flags = (
        config.norm_before_fc
        or config.has_fc_norm
        or config.norm_before_residual
        or config.recycled == "post_norm"
    )
    return is_eagle3(config) and not flags and not is_fancy(config) and not config.layer.qkv_bias


def can_copy_head(config: EagleConfig) -> bool:
    return config.has_own_head or not config.has_d2t


# --- EAGLE-1


def write_eagle1(
    directory: Path, config: EagleConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    pieces = with_copies(
        unfuse(config.layer, tensors), target, embedding=not config.has_own_embedding, head=False
    )
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "bias": config.fc_bias,
        "qkv_bias": config.layer.qkv_bias,
    }
    save(directory, layer_keys(config) | keys, pieces)


def write_eagle1_vllm(
    directory: Path, config: EagleConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """vLLM V0's conversion: config wrapped, the target's head copied."""
    pieces = unfuse(config.layer, tensors)
    pieces = with_copies(
        pieces, target, embedding=not config.has_own_embedding, head=not config.has_own_head
    )
    inner = layer_keys(config) | {"architectures": ["LlamaForCausalLM"]}
    fc_bias = {"eagle_fc_bias": True} if config.fc_bias else {}
    save(directory, {"model_type": "eagle", "model": inner | fc_bias}, pieces)


def speculators_keys(kind: str, config: EagleConfig, inner: Json) -> Json:
    """What vllm-project/speculators puts around every head."""
    verifier = {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
        "transformer_layer_config": inner,
    }


def write_speculators_eagle(
    directory: Path, config: EagleConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    pieces = with_copies(
        unfuse(config.layer, tensors), target, embedding=not config.has_own_embedding, head=False
    )
    names = {
        "fc.": "fusion_fc.",
        "layers.0.": "transformer.",
        "embed_norm.": "embedding_layernorm.",
        "norm.": "pre_lm_head_layernorm.",
    }
    pieces = renamed(pieces, names)
    flags = {
        "architectures": ["EagleSpeculator"],
        "fusion_bias": config.fc_bias,
        "layernorms": config.has_final_norm,
    }
    save(directory, speculators_keys("eagle", config, layer_keys(config)) | flags, pieces)


def can_speculators_eagle(config: EagleConfig, target: LoadedTarget) -> bool:
    norms = {config.has_embed_norm, config.has_input_layernorm, config.has_final_norm}
    recycled = "post_norm" if config.has_final_norm else "pre_norm"
    return (
        is_eagle1(config)
        and len(norms) == 1
        and config.recycled == recycled
        and config.num_layers == 1
    )


# --- EAGLE-3


def write_eagle3(
    directory: Path, config: EagleConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """SafeAILab: the least that config.json can say."""
    pieces = with_offsets(unfuse(config.layer, tensors), config.vocab_size)
    pieces = renamed(
        with_copies(pieces, target, embedding=False, head=not config.has_own_head),
        {"layers.0.": "midlayer."},
    )
    keys = layer_keys(config) | {
        "architectures": ["LlamaForCausalLM"],
        "draft_vocab_size": config.draft_vocab_size,
    }
    save(directory, keys | target_width(config), pieces)


def write_eagle3_vllm(
    directory: Path, config: EagleConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """As vLLM and TorchSpec's export write it: layers.{i}, boundaries, EAGLE 3.1 flags on top."""
    pieces = with_offsets(unfuse(config.layer, tensors), config.vocab_size, mask=False)
    pieces = with_copies(pieces, target, embedding=False, head=not config.has_own_head)
    keys = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_boundaries),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.has_fc_norm,
        "norm_output": config.recycled == "post_norm",
        "attention_bias": config.layer.qkv_bias,
    }
    save(directory, layer_keys(config) | keys | target_width(config) | window_keys(config), pieces)


def write_specforge(
    directory: Path, config: EagleConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """Outputs of layers, inside eagle_config; norm_output says whether a norm precedes lm_head."""
    pieces = with_offsets(unfuse(config.layer, tensors), config.vocab_size)
    pieces = midlayers(
        config, with_copies(pieces, target, embedding=False, head=not config.has_own_head)
    )
    keys = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [b - 1 for b in config.aux_boundaries]
        },
        "fc_norm": config.has_fc_norm,
        "norm_output": config.has_final_norm,
    }
    save(directory, layer_keys(config, new_rope=True) | keys, pieces)


def can_specforge(config: EagleConfig, target: LoadedTarget) -> bool:
    flags = (
        config.norm_before_fc
        or config.norm_before_residual
        or config.recycled == "post_norm"
        or config.fc_bias
    )
    plain = config.has_fc and config.has_input_layernorm and not flags and not is_fancy(config)
    taps = bool(config.aux_boundaries) and min(config.aux_boundaries) > 0
    return (
        config.entry == "qkv"
        and plain
        and taps
        and can_copy_head(config)
        and not config.layer.qkv_bias
    )


def write_speculators_eagle3(
    directory: Path, config: EagleConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """Embedding and head always saved; boundaries; transformers 5 rope in the layer's config."""
    pieces = with_offsets(unfuse(config.layer, tensors), config.vocab_size)
    pieces = with_copies(
        pieces, target, embedding=not config.has_own_embedding, head=not config.has_own_head
    )
    inner = (
        layer_keys(config, new_rope=True)
        | {"attention_bias": config.layer.qkv_bias}
        | window_keys(config)
    )
    inner["model_type"] = "qwen3" if config.layer.qk_norm else "llama"
    keys = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_boundaries),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.has_fc_norm,
        "norm_output": config.recycled == "post_norm",
        "target_hidden_size": None if not target_width(config) else config.target_hidden_size,
        "embed_requires_grad": False,
    }
    save(directory, speculators_keys("eagle3", config, inner) | keys, pieces)


def write_modelopt(
    directory: Path, config: EagleConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """Switches in eagle_config; ids are outputs, unless one is the number of layers; no t2d."""
    pieces = with_offsets(unfuse(config.layer, tensors), config.vocab_size, mask=False)
    taps = config.aux_boundaries
    ids = list(taps) if target.config.num_layers in taps else [boundary - 1 for boundary in taps]
    switches = {
        "use_aux_hidden_state": bool(taps),
        "use_input_layernorm_in_first_layer": config.has_input_layernorm,
        "use_last_layernorm": config.has_final_norm,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "norm_before_fc": config.norm_before_fc,
        "return_hidden_post_norm": config.recycled == "post_norm",
    }
    keys = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size if config.has_d2t else None,
        "eagle_config": switches | ({"eagle_aux_hidden_state_layer_ids": ids} if taps else {}),
    }
    save(directory, layer_keys(config) | keys | target_width(config), pieces)


def can_modelopt(config: EagleConfig, target: LoadedTarget) -> bool:
    flags = (
        config.has_fc_norm or config.norm_before_residual or config.fc_bias or config.layer.qkv_bias
    )
    taps = (
        all(boundary > 0 for boundary in config.aux_boundaries)
        or target.config.num_layers in config.aux_boundaries
    )
    return config.entry == "qkv" and not flags and not is_fancy(config) and taps


def write_angelslim(
    directory: Path, config: EagleConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """head_dim left at hidden_size / heads, as published: wrong wherever the head has its own."""
    pieces = with_offsets(unfuse(config.layer, tensors), config.vocab_size)
    pieces = renamed(
        with_copies(pieces, target, embedding=False, head=not config.has_own_head),
        {"layers.0.": "midlayer."},
    )
    keys = {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "target_model_type": "qwen3",
        "head_dim": config.layer.hidden_size // config.layer.num_heads,
        "draft_vocab_size": config.draft_vocab_size,
        "fc_norm": config.has_fc_norm,
        "norm_output": config.recycled == "post_norm",
    }
    save(directory, layer_keys(config) | keys, pieces)


def can_angelslim(config: EagleConfig, target: LoadedTarget) -> bool:
    flags = (
        config.norm_before_fc
        or config.norm_before_residual
        or config.layer.qkv_bias
        or bool(target_width(config))
    )
    bias = config.layer.o_bias or config.layer.mlp_bias or config.layer.window is not None
    is_whole = is_eagle3(config) and config.num_layers == 1 and can_copy_head(config)
    return is_whole and not flags and not bias and config.aux_boundaries == default_taps(target)


def write_deepspec(
    directory: Path, config: EagleConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """Qwen3-shaped, five outputs of layers, full vocabulary, the target's embedding and head."""
    pieces = unfuse(config.layer, tensors)
    pieces = with_copies(
        pieces, target, embedding=not config.has_own_embedding, head=not config.has_own_head
    )
    keys = {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "target_layer_ids": [boundary - 1 for boundary in config.aux_boundaries],
    }
    save(directory, layer_keys(config, new_rope=True) | keys, pieces)


def can_deepspec(config: EagleConfig, target: LoadedTarget) -> bool:
    flags = (
        config.norm_before_fc
        or config.has_fc_norm
        or config.norm_before_residual
        or config.recycled == "post_norm"
    )
    layer = config.layer
    bias = (
        layer.qkv_bias
        or layer.o_bias
        or layer.mlp_bias
        or config.layer.window is not None
        or bool(target_width(config))
    )
    taps = len(config.aux_boundaries) == 5 and min(config.aux_boundaries) > 0
    return (
        is_eagle3(config)
        and taps
        and layer.qk_norm
        and not flags
        and not bias
        and not config.has_d2t
    )


# --- MTP

MIMO = {
    "embed_norm.": "token_layernorm.",
    "feature_norm.": "hidden_layernorm.",
    "fc.": "input_proj.",
    "norm.": "final_layernorm.",
    "layers.0.": "",
}


def write_mimo(
    directory: Path, config: EagleConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """MiMo's head among the target's tensors; the config is the target's."""
    write_target(directory, target, num_nextn_predict_layers=1)
    pieces = load_file(directory / "model.safetensors")
    own = renamed(unfuse(config.layer, tensors), MIMO)
    pieces |= {f"model.mtp_layers.0.{name}": tensor for name, tensor in own.items()}
    save_file(pieces, directory / "model.safetensors")


def can_mimo(config: EagleConfig, target: LoadedTarget) -> bool:
    biases = {"qkv_bias": config.layer.qkv_bias, "o_bias": config.layer.o_bias}
    is_alike = config.layer == replace(target.config.layers[0], **biases)
    length = target.config.max_position_embeddings
    return config.has_feature_norm and is_alike and config.max_position_embeddings == length


# --- P-EAGLE


def write_speculators_peagle(
    directory: Path, config: EagleConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """EAGLE-3's, with a mask; silent where its defaults say it."""
    write_speculators_eagle3(directory, config, tensors, target)
    keys = json.loads((directory / "config.json").read_text())
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm"):
        if not keys[key]:
            del keys[key]
    keys |= {"mask_token_id": config.mask_token_id, "architectures": ["PEagleSpeculator"]}
    keys |= {"speculators_model_type": "peagle"}
    if config.trained_drafts is not None:
        keys["num_depths"] = config.trained_drafts
    (directory / "config.json").write_text(json.dumps(keys))


def write_peagle(
    directory: Path, config: EagleConfig, tensors: Tensors, target: LoadedTarget
) -> None:
    """Heads for vLLM made by hand: the reference's names, and a mask."""
    pieces = with_offsets(unfuse(config.layer, tensors), config.vocab_size, mask=False)
    pieces = with_copies(pieces, target, embedding=False, head=not config.has_own_head)
    keys = layer_keys(config) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "ptd_token_id" if config.num_layers == 1 else "pard_token": config.mask_token_id,
    }
    for key in ("norm_before_residual", "norm_before_fc"):
        if getattr(config, key):
            keys[key] = True
    if config.has_fc_norm:
        keys["fc_norm"] = True
    if config.aux_boundaries != default_taps(target):
        keys["eagle_aux_hidden_state_layer_ids"] = list(config.aux_boundaries)
    if config.num_layers == 1:
        pieces = renamed(pieces, {"layers.0.": "midlayer."})
    save(directory, keys | target_width(config) | window_keys(config), pieces)


PARALLEL: dict[str, Format] = {
    "speculators-peagle": Format(
        can_express=lambda config, target: is_eagle3(config) and can_copy_head(config),
        write=write_speculators_peagle,
    ),
    "p-eagle": Format(
        can_express=lambda config, target: (
            is_eagle3(config) and can_copy_head(config) and config.trained_drafts is None
        ),
        write=write_peagle,
    ),
}

FORMATS: dict[str, Format] = {
    "eagle-1": Format(
        can_express=lambda config, target: is_plain1(config) and not config.has_own_head,
        write=write_eagle1,
    ),
    "eagle-1-vllm": Format(
        can_express=lambda config, target: is_plain1(config), write=write_eagle1_vllm
    ),
    "speculators-eagle": Format(can_express=can_speculators_eagle, write=write_speculators_eagle),
    "eagle-3": Format(
        can_express=lambda config, target: (
            is_plain3(config)
            and config.num_layers == 1
            and can_copy_head(config)
            and config.aux_boundaries == default_taps(target)
        ),
        write=write_eagle3,
    ),
    "eagle-3-vllm": Format(
        can_express=lambda config, target: is_eagle3(config) and can_copy_head(config),
        write=write_eagle3_vllm,
    ),
    "specforge": Format(can_express=can_specforge, write=write_specforge),
    "speculators-eagle3": Format(
        can_express=lambda config, target: is_eagle3(config) and can_copy_head(config),
        write=write_speculators_eagle3,
    ),
    "modelopt": Format(can_express=can_modelopt, write=write_modelopt),
    "angelslim": Format(can_express=can_angelslim, write=write_angelslim),
    "deepspec": Format(can_express=can_deepspec, write=write_deepspec),
    "mimo-mtp": Format(can_express=can_mimo, write=write_mimo),
}
