"""Tiny random targets that transformers makes and saves, and what its eager attention says."""

from pathlib import Path

import torch
import transformers
from torch import Tensor

SIZES = {
    **{"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 256, "use_cache": False},
    "eos_token_id": 1,
}
QWEN3 = {"head_dim": 16, "intermediate_size": 80, "moe_intermediate_size": 24}
EXPERTS = {"num_experts_per_tok": 3, "num_local_experts": 12}
MULTIPLIERS = {
    **{"embedding_multiplier": 6.0, "attention_multiplier": 0.4},
    **{"residual_multiplier": 0.6, "logits_scaling": 3.0},
}
# name: prefix of the classes in transformers, and keys of its config
TARGETS = {
    "qwen3_moe, a dense layer": (
        "Qwen3Moe",
        QWEN3 | EXPERTS | {"mlp_only_layers": [3], "norm_topk_prob": True},
    ),
    "qwen3_moe, every second": (
        "Qwen3Moe",
        QWEN3 | EXPERTS | {"decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "mixtral": ("Mixtral", EXPERTS | {"intermediate_size": 24}),
    "granitemoe": ("GraniteMoe", EXPERTS | MULTIPLIERS | {"intermediate_size": 24}),
    "granite": ("Granite", MULTIPLIERS | {"intermediate_size": 80}),
    "mistral, windows": ("Mistral", {"intermediate_size": 80, "sliding_window": 24}),
    "qwen2, later windows": (
        "Qwen2",
        {"intermediate_size": 80, "sliding_window": 24, "use_sliding_window": True}
        | {"max_window_layers": 4},
    ),
}
# a window and sinks, a limit that clamps, and positions beyond the original length
GPT_OSS = {
    **{"hidden_size": 64, "head_dim": 16, "intermediate_size": 32, "sliding_window": 24},
    **{"num_local_experts": 9, "num_experts_per_tok": 4, "swiglu_limit": 1.5},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 32.0},
        **{"beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64},
    },
}
OTHERS = {  # targets that have tests of their own
    "gpt_oss": ("GptOss", GPT_OSS),
    **{"llama": ("Llama", {}), "qwen3": ("Qwen3", {}), "qwen3_moe": ("Qwen3Moe", {})},
}
SPREADS = {"sinks": 1.5, "norm": 0.15, "embed": 0.15, "head": 0.3}  # of parameters, by name


def save(name: str, directory: Path, seed: int = 0, **changes: object) -> torch.nn.Module:
    """Make the target of this name, save it, and return it in evaluation mode.

    changes: of its config
    """
    prefix, keys = (TARGETS | OTHERS)[name]
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | keys | changes))
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    spread = 0.2 if name == "gpt_oss" else 0.3  # float32 is too coarse for more of it
    for key, tensor in model.named_parameters():
        found = next((each for part, each in SPREADS.items() if part in key), spread)
        tensor.data.normal_(float("norm" in key), found)
    model.save_pretrained(directory)
    return model


@torch.no_grad()
def logits_of(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    """Compute [tokens, V] by transformers."""
    return model(torch.tensor([tokens])).logits[0]
