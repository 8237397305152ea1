"""Checkpoints of FP8 from plain ones, in both published forms, and the numbers that they mean."""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.weights.published import save

LARGEST = 448.0
FORMS = ("channel", "block")
PRODUCT = re.compile(r".*\.layers\.\d+\..*_proj\.weight")
# as in RedHatAI's Meta-Llama-3.1-8B-Instruct-FP8-dynamic
CHANNEL = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                **{"actorder": None, "block_structure": None, "dynamic": True, "group_size": None},
                **{"num_bits": 8, "observer": None, "observer_kwargs": {}, "strategy": "token"},
                **{"symmetric": True, "type": "float"},
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": None},
                **{"num_bits": 8, "observer": "minmax", "observer_kwargs": {}},
                **{"strategy": "channel", "symmetric": True, "type": "float"},
            },
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": 1.5,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
# as in Qwen3-8B-FP8
BLOCK = {
    **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
    "weight_block_size": [128, 128],
}
CONFIGS = {"channel": CHANNEL, "block": BLOCK}
# tiny targets whose rows end inside a block of 128, and their fused parts too
ODD = {"num_hidden_layers": 2, "head_dim": 24, "num_attention_heads": 8}
ODD_TARGETS: dict[str, dict[str, object]] = {
    "llama": ODD | {"hidden_size": 192, "intermediate_size": 320},
    "qwen3": ODD | {"hidden_size": 320, "intermediate_size": 192},
    "qwen3_moe": {
        **{**ODD, "hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 320},
        **{"num_local_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
        "norm_topk_prob": True,
    },
}


def save_odd(name: str, directory: Path, **changes: object) -> Path:
    """Let transformers make and save a tiny target of this model type."""
    save(name, directory, **(ODD_TARGETS[name] | changes))
    return directory


def write_fp8(
    source: Path, out: Path, form: str, plain: str = "", is_flat: bool = False, **keys: object
) -> dict[str, Tensor]:
    """Write a checkpoint in FP8; return its products' weights as numbers of float32, by name.

    plain:   a pattern of products that stay as they are; the config has to say so
    is_flat: scales of rows are [N], not [N, 1]
    keys:    of quantization_config, instead of those that are published
    """
    shutil.copytree(source, out, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    numbers = {}
    for name in [name for name in tensors if PRODUCT.fullmatch(name)]:
        if plain and re.search(plain, name):
            continue
        codes, scales = quantised(tensors[name], form)
        numbers[name] = numbers_of(codes, scales)
        tensors[name] = codes
        tensors[f"{name}_scale{'_inv' if form == 'block' else ''}"] = (
            scales.flatten() if is_flat else scales
        )
    save_file(tensors, out / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = CONFIGS[form] | keys
    (out / "config.json").write_text(json.dumps(config))
    return numbers


def quantised(weight_NK: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Make codes [N, K], and scales [N, 1] in bfloat16 or of blocks in float32."""
    N, K = weight_NK.shape
    rows, columns = (128, 128) if form == "block" else (1, K)
    scales = torch.tensor(
        [
            [
                float(weight_NK[n : n + rows, k : k + columns].abs().max())
                for k in range(0, K, columns)
            ]
            for n in range(0, N, rows)
        ]
    )
    scales = scales.clamp(min=1e-10) / LARGEST
    scales = scales if form == "block" else scales.bfloat16()
    wide = spread(scales, N, K)
    return (weight_NK.float() / wide).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def spread(scales: Tensor, N: int, K: int) -> Tensor:
    """Give each number of a weight [N, K] its scale, in float32."""
    n, k = torch.arange(N), torch.arange(K)
    rows = n if len(scales) == N else n // 128
    columns = k * 0 if scales.shape[1] == 1 else k // 128
    return scales.float()[rows][:, columns]


def numbers_of(codes: Tensor, scales: Tensor) -> Tensor:
    """Multiply codes by their scales, in float32."""
    return codes.float() * spread(scales, *codes.shape)
