"""Write a checkpoint's decoder layers in FP8, as published forms have them; all else as it is.

    python -m scripts.quantise path/to/Qwen3-8B Qwen3-8B-FP8-dynamic --form channel
    python -m scripts.quantise demo demo-fp8 --form block

channel: a scale for each row (compressed-tensors); block: for each 128 by 128 (quant_method fp8).
A scale is the largest number / 448, rounded to bfloat16; a code is the nearest to number / scale.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.start.locate import locate
from weights.config import BLOCK
from weights.convert import write_whole
from weights.families.table import FAMILIES
from weights.files.reader import INDEX, Reader
from weights.fp8 import is_scale
from weights.load import bind_target
from weights.report import Log

LARGEST = 448.0
LEAST = 1e-10  # of the largest numbers, so that no scale is 0
NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
GROUP = {
    "targets": ["Linear"],
    "weights": NUMBERS | {"strategy": "channel", "dynamic": False},
    "input_activations": NUMBERS | {"strategy": "token", "dynamic": True},
}
CONFIGS: dict[str, dict[str, object]] = {
    "channel": {
        **{"quant_method": "compressed-tensors", "format": "float-quantized"},
        **{"config_groups": {"group_0": GROUP}, "ignore": ["lm_head"], "kv_cache_scheme": None},
        "quantization_status": "compressed",
    },
    "block": {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
        "weight_block_size": [BLOCK, BLOCK],
    },
}
# under which key are the modules that stay plain
IGNORED = {"channel": "ignore", "block": "modules_to_not_convert"}


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="a directory, a hub id or a bundled name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--form", choices=CONFIGS, required=True)
    parser.add_argument("--device", default="cpu", help="where numbers are rounded")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    given = parse_args(args)
    write(locate(given.source, "target"), given.out, given.form, given.device)


def write(source: Path, out: Path, form: str, device: str = "cpu") -> None:
    """Write the checkpoint file by file. ValueError: it has this form, or its family never has."""
    reader = Reader(source)
    config, _, held = bind_target(reader, Log())
    reader.problems.raise_if_any()
    if "fp8 block" not in FAMILIES[config.model_type].forms:
        raise ValueError(f"{source}: weights of {config.model_type} are not read in FP8")
    if any(is_scale(name) for name in held):
        raise ValueError(f"{source}: is quantised already")
    out.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy(file, out)
    products = {entry.name for name, entry in held.items() if name.endswith("_proj.weight")}
    ending = "_scale" if form == "channel" else "_scale_inv"
    names: dict[str, str] = {}
    for file in sorted({entry.file for entry in reader.entries.values()}):
        tensors: dict[str, Tensor] = {}
        for name in [name for name, entry in reader.entries.items() if entry.file == file]:
            tensor = reader.read(name)
            if name in products:
                codes, scales = quantised(tensor.to(device), form)
                tensor, tensors[f"{name}{ending}"] = codes.cpu(), scales.cpu()
            tensors[name] = tensor
        write_whole(tensors, out / file.name)
        names |= dict.fromkeys(tensors, file.name)
    if (source / INDEX).exists():
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    keys = json.loads((source / "config.json").read_text())
    # the weights that choose experts, by their names on disk
    routers = [entry.name for name, entry in held.items() if name.endswith(".mlp.gate.weight")]
    plain = ["lm_head", *(name.removesuffix(".weight") for name in routers)]
    how = CONFIGS[form] | {IGNORED[form]: plain}
    (out / "config.json").write_text(json.dumps(keys | {"quantization_config": how}))


def quantised(weight_NK: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Round a weight to codes of e4m3 [N, K], with bfloat16 scales [N, 1] or of blocks."""
    N, K = weight_NK.shape
    rows, columns = (BLOCK, BLOCK) if form == "block" else (1, K)
    padded = F.pad(weight_NK.float(), (0, -K % columns, 0, -N % rows))
    tiles = padded.view(len(padded) // rows, rows, -1, columns)
    scales = (tiles.abs().amax((1, 3)).clamp(min=LEAST) / LARGEST).bfloat16()
    numbers = (tiles / scales.float()[:, None, :, None]).clamp(-LARGEST, LARGEST)
    codes = numbers.view(padded.shape)[:N, :K].to(torch.float8_e4m3fn)
    return codes.contiguous(), scales


if __name__ == "__main__":
    main()
