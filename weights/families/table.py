"""The rows, by model_type.

Facts: transformers, models/{llama,mistral,qwen2,qwen3}/{configuration,modeling}_*.py.
"""

from weights.families.family import Family

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
        sliding_window=4096,
    ),
    "qwen2": Family(
        title="Qwen2",
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        max_position_embeddings=32768,
        sliding_window=4096,
        window_switch="use_sliding_window",
    ),
    "qwen3": Family(
        title="Qwen3",
        architecture="Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        head_dim=128,
        max_position_embeddings=32768,
        sliding_window=4096,
        window_switch="use_sliding_window",
    ),
}


def titles() -> str:
    """List the families for people: "Llama, Mistral and Qwen2"."""
    *others, last = (family.title for family in FAMILIES.values())
    return f"{', '.join(others)} and {last}"
