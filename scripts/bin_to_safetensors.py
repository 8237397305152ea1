"""Turn pytorch_model.bin (one file, or shards with an index) into model.safetensors, without running pickled code.

    python -m scripts.bin_to_safetensors path/to/EAGLE3-LLaMA3.1-Instruct-8B
    python -m scripts.bin_to_safetensors path/to/head --progress off

torch.load(weights_only=True) reads the tensors; tensors that share memory are written once each. An existing
model.safetensors is never replaced, and the new one appears whole or not at all. The .bin files are left as they are.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
RESULT = "model.safetensors"


def convert(directory: Path, progress: bool = True) -> Path:
    """Write `directory`/model.safetensors from its .bin files and return its path."""
    result = directory / RESULT
    if result.exists() or (directory / f"{RESULT}.index.json").exists():
        raise ValueError(f"{directory}: safetensors are there already, nothing written")
    tensors: dict[str, Tensor] = {}
    for file in tqdm(bin_files(directory), desc="reading", unit="file", disable=not progress):
        for name, tensor in read_bin(file):
            if name in tensors:
                raise ValueError(f"{file}: {name} is in an earlier file too")
            tensors[name] = tensor
    write_whole(tensors, result)
    return result


def bin_files(directory: Path) -> list[Path]:
    """The files to read: those of the index, else pytorch_model.bin, else the only .bin there is."""
    if (directory / INDEX).is_file():
        weight_map = json.loads((directory / INDEX).read_bytes())["weight_map"]
        return [directory / name for name in sorted(set(weight_map.values()))]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    files = sorted(directory.glob("*.bin"))
    if len(files) != 1:
        raise ValueError(
            f"{directory}: needs {SINGLE} or {INDEX}, has {[file.name for file in files] or 'no .bin file'}"
        )
    return files


def read_bin(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Named tensors of one state dict, each with memory of its own."""
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file}: not a plain dict of tensors")
    for name, tensor in state.items():
        yield name, tensor.detach().clone(memory_format=torch.contiguous_format)


def write_whole(tensors: dict[str, Tensor], result: Path) -> None:
    """Write beside the result, then rename: a crash leaves no half of it."""
    part = result.with_name(f"{result.name}.part-{os.getpid()}")
    try:
        save_file(tensors, part, metadata={"format": "pt"})
        part.rename(result)
    finally:
        part.unlink(missing_ok=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="the checkpoint directory")
    parser.add_argument("--progress", choices=["on", "off"], default="on")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    try:
        result = convert(args.directory, args.progress == "on")
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    print(f"{result}: {result.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
