"""Pairs of random weights: a target of a published model's sizes, and an EAGLE-3 head.

The files are headers with holes after them. What a load reads is drawn on the device: rows choose
different experts, and drafts hold by luck alone.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor

from weights.arrange import arrange
from weights.config import LayerKind
from weights.demo import demo_directory, demo_prompts
from weights.errors import Problems
from weights.families.kinds import read_layers
from weights.families.table import FAMILIES
from weights.fields import Fields
from weights.report import Log
from weights.shapes import Shapes, layer_shapes

Config = dict[str, object]
HEAD_VOCABULARY = 32000
COMMON: Config = {
    **{"hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False},
    **{"norm_topk_prob": True, "sliding_window": None},
}
KEYS = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "rope_theta", "max_position_embeddings"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size"),
)
OF_TARGETS: dict[str, Config] = {  # what KEYS do not say, by model_type
    "gpt_oss": {"sliding_window": 128, "quantization_config": {"quant_method": "mxfp4"}}
}
MODELS = {  # by KEYS, from published config.json; then the width of the head's MLP
    "qwen3-30b-a3b": "qwen3_moe 2048 48 32 4 128 151936 1e6 40960 128 8 768 6144 12288",
    "mixtral-8x7b": "mixtral 4096 32 32 8 128 32000 1e6 32768 8 2 14336 14336 14336",
    "gpt-oss-20b": "gpt_oss 2880 24 64 8 64 201088 150000 131072 32 4 2880 2880 17280",
    "gpt-oss-120b": "gpt_oss 2880 36 64 8 64 201088 150000 131072 128 4 2880 2880 17280",
    "qwen3-8b": "qwen3 4096 36 32 8 128 151936 1e6 40960 1 1 1 12288 12288",
    "tiny-gpt-oss": "gpt_oss 128 8 2 1 64 4096 1e4 2048 8 2 64 64 128",
    "tiny": "qwen3_moe 128 8 2 1 64 4096 1e4 2048 8 2 32 128 128",
}


def draft_vocabulary(model: str) -> int:
    """Count the ids that the head knows."""
    _, *sizes = MODELS[model].split()
    return min(HEAD_VOCABULARY, int(sizes[KEYS.index("vocab_size") - 1]))


def write_pair(out: Path, model: str) -> None:
    """Write out/target and out/eagle3, whose weights take no space: they are never read."""
    model_type, *sizes = MODELS[model].split()
    *numbers, head_width = map(json.loads, sizes)
    config = COMMON | dict(zip(KEYS, [model_type, *numbers], strict=True))
    own = OF_TARGETS.get(model_type, {})
    V, D = (int(str(config[key])) for key in ("vocab_size", "hidden_size"))
    W = draft_vocabulary(model)
    head = config | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    head |= {"intermediate_size": head_width, "num_hidden_layers": 1, "draft_vocab_size": W}
    shapes = layer_shapes("midlayer.", _layers(head)[0], 2 * D)
    shapes |= {"fc.weight": (D, 3 * D), "norm.weight": (D,), "lm_head.weight": (W, D)}
    write_files(out / "eagle3", head, shapes | {"midlayer.hidden_norm.weight": (D,), "d2t": (W,)})
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i, kind in enumerate(_layers(config | own)):
        shapes |= layer_shapes(f"model.layers.{i}.", kind, D)
    write_files(out / "target", config | own, shapes | {"lm_head.weight": (V, D)})
    for file in demo_directory("target").glob("tokenizer*"):
        shutil.copy(file, out / "target")
    (out / "prompts.json").write_text(json.dumps(demo_prompts()))


def _layers(config: Config) -> tuple[LayerKind, ...]:
    fields = Fields(config, "config.json", Problems(Path()))
    family = FAMILIES[str(config["model_type"])]
    return read_layers(fields, family, int(str(config["num_hidden_layers"])), sys.maxsize, Log())


def write_files(out: Path, config: Config, shapes: Shapes) -> None:
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():  # their weights are a hole after the header
        is_packed = name.endswith(("_blocks", "_scales"))
        dtype, size = ("I64", 8) if name == "d2t" else ("U8", 1) if is_packed else ("BF16", 2)
        start, end = end, end + torch.Size(shape).numel() * size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (out / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def draw(
    reader: object,
    wanted: Shapes,
    *_: object,
    dtype: torch.dtype,
    device: torch.device,
    **__: object,
) -> dict[str, Tensor]:
    """Draw what a checkpoint would hold: norms are 1, biases 0, products keep the size of rows."""
    tensors = arrange(wanted).empty(dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for name, x in tensors.items():
        if name.endswith("_scales"):
            x.fill_(0x78787878)  # 2^-7, of codes that are about 3 large
        elif x.dtype == torch.int32:
            x.random_(-(2**31), 2**31, generator=generator)
        elif x.ndim == 1 or name.endswith("_bias"):
            x.fill_(float(not name.endswith("bias")))
        else:
            x.normal_(0, x.shape[-1] ** -0.5, generator=generator)
    return tensors
