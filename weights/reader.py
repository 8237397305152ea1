"""A checkpoint directory as a table of tensors: one safetensors file, or shards with an index.

Everything the headers and the index say is checked first; `read` then copies one tensor at a time out of a memory map,
straight to a device. It keeps no state beside the maps, so several threads may read different tensors.
"""

import json
import mmap
from pathlib import Path

import torch
from torch import Tensor

from weights.errors import CheckpointError, Problems
from weights.header import TORCH_DTYPES, TensorEntry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Reader:
    """The tensors of `directory` by the names in its files; nothing is read until `read` is called."""

    def __init__(self, directory: Path) -> None:
        problems = Problems(directory)
        self.directory = directory
        self.entries = _entries(directory, problems)
        problems.raise_if_any()
        self._maps = {entry.file: _map(entry.file) for entry in self.entries.values() if entry.num_bytes}

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """One tensor with the dtype and shape of its header, in memory of its own."""
        entry = self.entries[name]
        dtype = TORCH_DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(self.directory, (f"{entry.file.name}: {name} is {entry.dtype}, not supported",))
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=dtype, device=device)
        raw = torch.frombuffer(self._maps[entry.file], dtype=torch.uint8, count=entry.num_bytes, offset=entry.start)
        return raw.to(device, copy=True).view(dtype).reshape(entry.shape)


def _map(file: Path) -> mmap.mmap:
    with file.open("rb") as stream:
        # a private map: torch wants a writable buffer, the file is never written
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def _entries(directory: Path, problems: Problems) -> dict[str, TensorEntry]:
    if not directory.is_dir():
        problems.add("no such directory")
        return {}
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE, problems)
    if (directory / INDEX).is_file():
        return _sharded(directory, problems)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0], problems)
    problems.add(_nothing_to_read(directory, files))
    return {}


def _nothing_to_read(directory: Path, files: list[Path]) -> str:
    if files:
        return f"several safetensors files ({', '.join(file.name for file in files)}) and no {INDEX}"
    pickles = sorted(file.name for file in directory.glob("*.bin"))
    if pickles:
        return (
            f"only {', '.join(pickles)}: pickles are not read. Convert once (weights_only=True, no code is run): "
            f"python -m scripts.bin_to_safetensors {directory}"
        )
    return f"neither {SINGLE} nor {INDEX}"


def _sharded(directory: Path, problems: Problems) -> dict[str, TensorEntry]:
    weight_map = _weight_map(directory / INDEX, problems)
    shards = {shard: _shard(directory, shard, problems) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if shards[shard] is not None and name not in (shards[shard] or {}):
            problems.add(f"{INDEX}: {name} is said to be in {shard}, which does not hold it")
    for shard, held in shards.items():
        for name in held or {}:
            if weight_map.get(name) != shard:
                problems.add(f"{shard}: {name} is not where {INDEX} says ({weight_map.get(name, 'nowhere')})")
    return {name: entry for held in shards.values() for name, entry in (held or {}).items()}


def _weight_map(index: Path, problems: Problems) -> dict[str, str]:
    try:
        values = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        problems.add(f"{INDEX}: not JSON ({error})")
        return {}
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        problems.add(f"{INDEX}: weight_map must be an object of tensor names to file names")
        return {}
    return weight_map


def _shard(directory: Path, shard: str, problems: Problems) -> dict[str, TensorEntry] | None:
    """The tensors of one shard; None where the file cannot be read at all."""
    if Path(shard).name != shard:
        problems.add(f"{INDEX}: {shard!r} is not the name of a file in this directory")
        return None
    if not (directory / shard).is_file():
        problems.add(f"{shard}: named by {INDEX}, missing")
        return None
    return read_header(directory / shard, problems)
