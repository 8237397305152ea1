"""Checkpoints of gpt-oss after changes, and one model in both forms of its weights."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.weights.mxfp4 import drawn, numbers_of

QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def rewritten(
    source: Path,
    out: Path,
    change: Callable[[dict[str, Tensor]], object],
    absent: Sequence[str] = (),
    **keys: object,
) -> Path:
    """Write a checkpoint after changes of tensors and config to `out`."""
    shutil.copytree(source, out, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, out / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | keys
    config = {key: value for key, value in config.items() if key not in absent}
    (out / "config.json").write_text(json.dumps(config))
    return out


def pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put drawn MXFP4 weights in the place of the experts' own; return the same as numbers."""
    torch.manual_seed(1)
    numbers = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = tensors.pop(name).shape
        blocks, scales = drawn(E, N, K)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        numbers[name] = numbers_of(blocks, scales).float().transpose(1, 2)
    return numbers


def write_both_forms(source: Path, packed: Path, plain: Path) -> None:
    """Write a checkpoint with other experts in MXFP4, and the same ones with a number each."""
    numbers: dict[str, Tensor] = {}
    rewritten(source, packed, lambda x: numbers.update(pack(x)), quantization_config=QUANTISED)
    rewritten(source, plain, lambda x: x.update(numbers))
