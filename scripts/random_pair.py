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

from scripts.random_models import COMMON, KEYS, MODELS, OF_TARGETS, Config
from weights.arrange import arrange
from weights.config import LayerKind
from weights.demo import demo_directory, demo_prompts
from weights.errors import Problems
from weights.families.kinds import read_layers
from weights.families.table import FAMILIES
from weights.fields import Fields
from weights.fp8 import is_scale, scale_of
from weights.report import Log
from weights.shapes import Shapes, layer_shapes

HEAD_VOCABULARY = 32000
CODES = 64.0  # how large codes of FP8 are drawn, of up to 448


def draft_vocabulary(model: str) -> int:
    """Count the ids that the head knows."""
    _, *sizes = MODELS[model].split()
    return min(HEAD_VOCABULARY, int(sizes[KEYS.index("vocab_size") - 1]))


def write_pair(out: Path, model: str) -> None:
    """Write out/target and out/eagle3, whose weights take no space: they are never read."""
    model_type, *sizes = MODELS[model].split()
    *numbers, head_width = map(json.loads, sizes)
    config = COMMON | dict(zip(KEYS, [model_type, *numbers], strict=True))
    own = OF_TARGETS.get(model, {})
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
    num_layers = int(str(config["num_hidden_layers"]))
    return read_layers(fields, family, num_layers, sys.maxsize, Log(), {})


def write_files(out: Path, config: Config, shapes: Shapes) -> None:
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():  # their weights are a hole after the header
        dtype, size = ("I64", 8) if name == "d2t" else ("BF16", 2)
        if name.endswith(("_blocks", "_scales")):
            dtype, size = "U8", 1
        elif scale_of(name) in shapes:
            dtype, size = "F8_E4M3", 1
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
        if x.dtype == torch.float8_e4m3fn:
            x.copy_(torch.empty_like(x, dtype=dtype).normal_(0, CODES, generator=generator))
        elif x.dtype == torch.float32 and (is_scale(name) or name.endswith("_scales")):
            weight = tensors[name.removesuffix("_scales" if "experts" in name else "_scale")]
            x.fill_(weight.shape[-1] ** -0.5 / CODES)
        elif name.endswith("_scales"):
            x.fill_(0x78787878)  # 2^-7, of codes that are about 3 large
        elif x.dtype == torch.int32:
            x.random_(-(2**31), 2**31, generator=generator)
        elif x.ndim == 1 or name.endswith("_bias"):
            x.fill_(float(not name.endswith("bias")))
        else:
            x.normal_(0, x.shape[-1] ** -0.5, generator=generator)
    return tensors
