"""What a checkpoint says: bounds-checked safetensors, typed configs, every EAGLE format under one set of names.

Names after a load, the same whatever the file called them (D hidden, C head channels, H/G query/kv heads, I mlp width):

    embed_tokens.weight [V, D]                       absent from a draft that borrows the target's
    layers.{i}.input_layernorm.weight [D]            (draft: absent where the config says so)
    layers.{i}.hidden_norm.weight [D]                draft, entry "qkv", layer 0
    layers.{i}.self_attn.qkv_proj.weight [(H+2G)C, D or 2D], .bias
    layers.{i}.self_attn.q_norm.weight [C], k_norm.weight [C]
    layers.{i}.self_attn.o_proj.weight [D, HC], .bias
    layers.{i}.post_attention_layernorm.weight [D]
    layers.{i}.mlp.gate_up_proj.weight [2I, D], .bias
    layers.{i}.mlp.down_proj.weight [D, I], .bias
    norm.weight [D]                                  absent where has_final_norm is False
    lm_head.weight [V or W, D]                       absent if tied (target) or borrowed (draft)
    fc.weight, fc.bias, input_norm.weight, fc_norm.{i}.weight, embed_norm.weight     drafts only
    d2t [W] int64                                    absolute target ids (the file's offsets added up), drafts only
"""

from weights.config import EagleConfig, LayerConfig, RopeConfig, TargetConfig
from weights.demo import demo_directory, demo_prompts
from weights.errors import CheckpointError
from weights.files.header import TensorEntry
from weights.inspect import Inspection, inspect_checkpoint
from weights.load import LoadedEagle, LoadedTarget, load_eagle, load_target
from weights.report import BindingReport, Resolved

__all__ = [
    "BindingReport",
    "CheckpointError",
    "EagleConfig",
    "Inspection",
    "LayerConfig",
    "LoadedEagle",
    "LoadedTarget",
    "Resolved",
    "RopeConfig",
    "TargetConfig",
    "TensorEntry",
    "demo_directory",
    "demo_prompts",
    "inspect_checkpoint",
    "load_eagle",
    "load_target",
]
