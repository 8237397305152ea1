"""The rows, by model_type.

Facts: transformers, models/MODEL_TYPE/{configuration,modeling}_*.py, and MiMo's own modeling file;
names of tensors: conversion_mapping.py there. What heads for gpt-oss mean by ids of layers:
SGLang's issue 32334, in which NVIDIA's, read as outputs, lost a state and agreed less.
"""

from dataclasses import replace

from weights.config import Clamp
from weights.families.family import ExpertsRow, Family
from weights.rename import Row

MIXTRAL = "Mixtral's own"
GRANITE = "Granite-MoE's own"
GPT_OSS = "gpt-oss's own"
MTP = "an MTP head: give the target's directory as the draft, too, to use it"
QWEN2 = Family(
    title="Qwen2",
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    max_position_embeddings=32768,
    has_window=True,
    sliding_window=4096,
    window_switch="use_sliding_window",
    window_start="max_window_layers",
)

FAMILIES = {
    "llama": Family(
        title="Llama",
        architecture="LlamaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family(
        title="Mistral",
        architecture="MistralForCausalLM",
        max_position_embeddings=131072,
        has_window=True,
        sliding_window=4096,
    ),
    "qwen2": QWEN2,
    "qwen3": Family(
        title="Qwen3",
        architecture="Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        head_dim=128,
        max_position_embeddings=32768,
        has_window=True,
        sliding_window=4096,
        window_switch="use_sliding_window",
        window_start="max_window_layers",
    ),
    "mimo": replace(
        QWEN2,
        title="MiMo",
        architecture="MiMoForCausalLM",
        names=(Row(r"^mtp_layers\.", None, MTP),),
    ),
    "granite": Family(
        title="Granite",
        architecture="GraniteForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        has_multipliers=True,
    ),
    "qwen3_moe": Family(
        title="Qwen3-MoE",
        architecture="Qwen3MoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        max_position_embeddings=32768,
        has_window=True,
        sliding_window=4096,
        window_switch="use_sliding_window",
        experts=ExpertsRow(
            num=128,
            per_token=8,
            width="moe_intermediate_size",
            default_width=768,
            renormalise="norm_topk_prob",
            has_dense_layers=True,
        ),
    ),
    "mixtral": Family(
        title="Mixtral",
        architecture="MixtralForCausalLM",
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        has_window=True,
        names=(
            Row(r"\.block_sparse_moe\.", ".mlp.", MIXTRAL),
            Row(r"\.w1\.weight", ".gate_proj.weight", MIXTRAL),
            Row(r"\.w3\.weight", ".up_proj.weight", MIXTRAL),
            Row(r"\.w2\.weight", ".down_proj.weight", MIXTRAL),
        ),
        experts=ExpertsRow(num=8, per_token=2, width="intermediate_size"),
    ),
    "granitemoe": Family(
        title="Granite-MoE",
        architecture="GraniteMoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_multipliers=True,
        forms=(),
        names=(
            Row(r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate.", GRANITE),
            Row(r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj", GRANITE),
            Row(r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj", GRANITE),
        ),
        experts=ExpertsRow(num=8, per_token=2, width="intermediate_size", is_stacked=True),
    ),
    "gpt_oss": Family(
        title="gpt-oss",
        architecture="GptOssForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        bias_default=True,
        has_sinks=True,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope={
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"truncate": False, "original_max_position_embeddings": 4096},
        },
        has_window=True,
        sliding_window=128,
        sliding=(True, False),
        forms=("mxfp4",),
        names_boundaries=True,
        names=(
            Row(r"\.mlp\.router\.", ".mlp.gate.", GPT_OSS),
            Row(r"\.experts\.(gate_up|down)_proj$", r".experts.\1_proj_turned", GPT_OSS),
        ),
        experts=ExpertsRow(
            num=128,
            per_token=4,
            width="intermediate_size",
            is_stacked=True,
            is_turned=True,
            has_biases=True,
            clamp=Clamp(limit=7.0, alpha=1.702),
        ),
    ),
}


def titles() -> str:
    """List the families for people: "Llama, Mistral and Qwen2"."""
    *others, last = (family.title for family in FAMILIES.values())
    return f"{', '.join(others)} and {last}"
