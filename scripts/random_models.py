"""The sizes of published models, for pairs of random weights (random_pair.py)."""

from scripts.quantise import CONFIGS as FP8

Config = dict[str, object]
COMMON: Config = {
    **{"hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False},
    **{"norm_topk_prob": True, "sliding_window": None},
}
KEYS = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "rope_theta", "max_position_embeddings"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size"),
)
GPT_OSS: Config = {"sliding_window": 128, "quantization_config": {"quant_method": "mxfp4"}}
CHANNEL, BLOCK = ({"quantization_config": FP8[form]} for form in ("channel", "block"))
OF_TARGETS: dict[str, Config] = {  # what KEYS do not say, by model
    **dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b", "tiny-gpt-oss"), GPT_OSS),
    **dict.fromkeys(("llama-3.1-8b-fp8", "tiny-fp8"), CHANNEL),
    **dict.fromkeys(("llama-3.1-8b-fp8-block", "qwen3-8b-fp8", "qwen3-30b-a3b-fp8"), BLOCK),
}
QWEN3_30B = "qwen3_moe 2048 48 32 4 128 151936 1e6 40960 128 8 768 6144 12288"
QWEN3_8B = "qwen3 4096 36 32 8 128 151936 1e6 40960 0 0 0 12288 12288"
LLAMA_8B = "llama 4096 32 32 8 128 128256 5e5 131072 0 0 0 14336 14336"
MODELS = {  # by KEYS, from published config.json; then the width of the head's MLP
    **dict.fromkeys(("qwen3-30b-a3b", "qwen3-30b-a3b-fp8"), QWEN3_30B),
    **dict.fromkeys(("llama-3.1-8b", "llama-3.1-8b-fp8", "llama-3.1-8b-fp8-block"), LLAMA_8B),
    **dict.fromkeys(("qwen3-8b", "qwen3-8b-fp8"), QWEN3_8B),
    "mixtral-8x7b": "mixtral 4096 32 32 8 128 32000 1e6 32768 8 2 14336 14336 14336",
    "gpt-oss-20b": "gpt_oss 2880 24 64 8 64 201088 150000 131072 32 4 2880 2880 17280",
    "gpt-oss-120b": "gpt_oss 2880 36 64 8 64 201088 150000 131072 128 4 2880 2880 17280",
    "tiny-gpt-oss": "gpt_oss 128 8 2 1 64 4096 1e4 2048 8 2 64 64 128",
    "tiny-fp8": "llama 128 8 2 1 64 4096 1e4 2048 0 0 0 192 128",
    "tiny": "qwen3_moe 128 8 2 1 64 4096 1e4 2048 8 2 32 128 128",
}
