"""Checkpoints: bounds-checked safetensors, typed configs, all draft formats under one set of names.

Names after a load (D hidden, C head channels, H/G query/kv heads, I MLP width):

    embed_tokens.weight [V, D]                       absent from a draft that borrows the target's
    layers.{i}.input_layernorm.weight [D]            (draft: absent where the config says so)
    layers.{i}.hidden_norm.weight [D]                draft, entry "qkv", layer 0
    layers.{i}.self_attn.qkv_proj.weight [(H+2G)C, D or 2D], .bias
    layers.{i}.self_attn.q_norm.weight [C], k_norm.weight [C]
    layers.{i}.self_attn.o_proj.weight [D, HC], .bias
    layers.{i}.post_attention_layernorm.weight [D]
    layers.{i}.mlp.gate_up_proj.weight [2I, D], .bias
    layers.{i}.mlp.down_proj.weight [D, I], .bias
    layers.{i}.*.weight_scale [N] or [K / 128, N]     float32, of weights in FP8 (fp8.py)
    layers.{i}.self_attn.sinks [H] float32
    layers.{i}.mlp.gate.weight [E, D], .bias         a router, where there are E experts
    layers.{i}.mlp.experts.gate_up_proj [E, 2I, D]   each expert's gate rows before its up rows
    layers.{i}.mlp.experts.down_proj [E, D, I]       (MXFP4: turned.py says what is here)
    layers.{i}.mlp.experts.{gate_up,down}_proj_bias, _scales (MXFP4 and FP8)
    norm.weight [D]                                  absent where has_final_norm is False
    lm_head.weight [V or W, D]                       absent if tied (target) or borrowed (draft)
    fc.weight, fc.bias, input_norm.weight, fc_norm.{i}.weight, embed_norm.weight     drafts only
    hidden_norm.weight [D], markov_head.markov_w1.weight [V, r], markov_w2.weight [W, r]  (blocks)
    markov_head.{gate,joint}, confidence_head.proj: .weight, .bias                        (blocks)
    d2t [W] int64                                    drafts only: absolute target ids, not offsets

A rank of several has fewer of H, G, I, E, V and W (cuts.py says along which axis each tensor is
cut); routers, d2t, fc, norms and the biases of o_proj and down_proj are whole.
"""

import importlib

_PUBLIC = {
    name: module
    for module, names in {
        "weights.config": ("Clamp", "ExpertsConfig", "LayerKind", "RopeConfig", "TargetConfig"),
        "weights.demo": ("demo_directory", "demo_prompts"),
        "weights.draft.config": ("BlockConfig", "EagleConfig"),
        "weights.errors": ("CheckpointError",),
        "weights.files.header": ("TensorEntry",),
        "weights.inspect": ("Inspection", "inspect_checkpoint"),
        "weights.load": ("LoadedEagle", "LoadedTarget", "load_eagle", "load_target"),
        "weights.report": ("BindingReport", "Resolved"),
        "weights.shard": ("Shard",),
    }.items()
    for name in names
}
__all__ = sorted(_PUBLIC)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    """Import a public name when it is asked for: weights.errors needs no torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'weights' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
