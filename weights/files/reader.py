"""A checkpoint directory as a table of tensors: one safetensors file, or shards with an index.

Everything the headers and the index say is checked first; `read`, `read_into` and `read_bytes` then
copy what lies in the files. The only state is the open files: threads may read in parallel.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from weights.errors import CheckpointError, Problems
from weights.files.guard import is_file_name, is_there, open_file, read_object
from weights.files.header import TORCH_DTYPES, TensorEntry, read_header
from weights.files.part import Part, Runs

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
AHEAD = 1 << 20  # bytes of one request to read ahead; the kernel cuts larger ones


class Reader:
    """The tensors of `directory` by the names in its files; further checks add to `problems`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problems = Problems(directory)
        self.entries = _entries(directory, self.problems)
        self.problems.raise_if_any()
        files = {entry.file for entry in self.entries.values() if entry.num_bytes}
        opened = {file: open_file(file, self.problems) for file in files}
        self.problems.raise_if_any()
        self._files = {file: stream for file, stream in opened.items() if stream is not None}

    def read(
        self, name: str, device: torch.device | str = "cpu", part: Part | None = None
    ) -> Tensor:
        """One tensor with the dtype and shape of its header, or part of it, in its own memory."""
        out = torch.empty(self._shape(name, part), dtype=self.dtype(name), device=device)
        self.read_into(name, out, part)
        return out

    def read_into(self, name: str, out: Tensor, part: Part | None = None) -> None:
        """Overwrite a contiguous tensor of the header's shape, cast on its device to its dtype.

        part: what is read, instead of the whole tensor
        """
        shape, dtype = self._shape(name, part), self.dtype(name)
        assert out.shape == shape, f"{name}: {tuple(out.shape)} for {shape}"
        is_stored = out.dtype == dtype and out.device.type == "cpu"
        stored = out if is_stored else torch.empty(shape, dtype=dtype)
        self.read_bytes(name, 0, as_bytes(stored), part)
        if not is_stored:
            out.copy_(stored.to(out.device))

    def read_bytes(self, name: str, start: int, out: Tensor, part: Part | None = None) -> None:
        """Fill a uint8 tensor on the CPU with the bytes of a tensor from byte `start` of it on.

        part: whose bytes these are, and `start` counts, instead of the whole tensor's
        """
        entry = self.entries[name]
        runs = Runs(0, entry.num_bytes, entry.num_bytes)
        if part is not None:
            runs = part.runs_in(entry.shape, self.dtype(name).itemsize)
        assert start + len(out) <= runs.num_bytes, f"{name}: {start} + {len(out)} bytes"
        if runs.count > 1 and len(out):
            self._announce(entry, *runs.hull(start, start + len(out)))
        view = out.numpy().data
        for place, num_bytes in runs.spans(start, start + len(out)):
            self._fill(view[:num_bytes], entry, place)
            view = view[num_bytes:]

    def _announce(self, entry: TensorEntry, start: int, stop: int) -> None:
        """Have the disk read all bytes from `start` to `stop` of a tensor ahead.

        Other ranks want those between ours, and a disk is slow at reads of some kilobytes: 512 MB
        in rows of 8 KiB of which a rank wants a quarter take 0.4 s instead of 1.2 s.
        """
        file = self._files[entry.file].fileno()
        for first in range(start, stop, AHEAD):
            num_bytes = min(AHEAD, stop - first)
            os.posix_fadvise(file, entry.start + first, num_bytes, os.POSIX_FADV_WILLNEED)

    def _fill(self, view: memoryview, entry: TensorEntry, start: int) -> None:
        """Read on from byte `start` of a tensor until `view` is full."""
        done = 0
        while done < len(view):
            try:
                place = entry.start + start + done
                count = os.preadv(self._files[entry.file].fileno(), [view[done:]], place)
            except OSError as error:
                line = f"{entry.where} cannot be read: {error.strerror}"
                raise CheckpointError(self.directory, (line,)) from error
            if count == 0:
                line = f"{entry.where} has lost its end since it was opened"
                raise CheckpointError(self.directory, (line,))
            done += count

    def _shape(self, name: str, part: Part | None) -> tuple[int, ...]:
        shape = self.entries[name].shape
        return shape if part is None else part.shape_in(shape)

    def dtype(self, name: str) -> torch.dtype:
        entry = self.entries[name]
        if entry.dtype not in TORCH_DTYPES:
            line = f"{entry.where} is {entry.dtype}, not supported"
            raise CheckpointError(self.directory, (line,))
        return TORCH_DTYPES[entry.dtype]


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as its bytes."""
    return tensor.view(-1).view(torch.uint8)


def _entries(directory: Path, problems: Problems) -> dict[str, TensorEntry]:
    if not os.path.isdir(directory):
        problems.add("no such directory")
        return {}
    if is_there(directory / SINGLE):
        return read_header(directory / SINGLE, problems)
    if is_there(directory / INDEX):
        return _sharded(directory, problems)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0], problems)
    problems.add(_nothing_to_read(directory, files))
    return {}


def _nothing_to_read(directory: Path, files: list[Path]) -> str:
    if files:
        names = ", ".join(file.name for file in files)
        return f"several safetensors files ({names}) and no {INDEX}"
    pickles = sorted(file.name for file in directory.glob("*.bin"))
    if pickles:
        return (
            f"only {', '.join(pickles)}: pickles are not read. Convert once (weights_only=True, "
            f"no code is run): specdec convert {directory}"
        )
    return f"neither {SINGLE} nor {INDEX}"


def _sharded(directory: Path, problems: Problems) -> dict[str, TensorEntry]:
    weight_map = read_weight_map(directory / INDEX, problems)
    names = sorted(set(weight_map.values()))
    shards = {shard: _shard(directory, shard, problems) for shard in names}
    for name, shard in weight_map.items():
        if problems.is_full:
            break
        held = shards[shard]
        if held is not None and name not in held:
            problems.add(f"{INDEX}: {name} is said to be in {shard}, which does not hold it")
    entries: dict[str, TensorEntry] = {}
    for shard, held in shards.items():
        for name, entry in (held or {}).items():
            entries[name] = entry
            mapped = weight_map.get(name, "nowhere")
            if mapped != shard:
                problems.add(f"{shard}: {name} is not where {INDEX} says ({mapped})")
    return entries


def read_weight_map(index: Path, problems: Problems) -> dict[str, str]:
    """Tensor name -> file name, as the index says; {} and a problem if it says neither."""
    values = read_object(index, problems)
    if values is None:
        return {}
    names = values.get("weight_map")
    if isinstance(names, dict) and all(isinstance(name, str) for name in names.values()):
        return names
    problems.add(f"{index.name}: weight_map must be an object of tensor names to file names")
    return {}


def _shard(directory: Path, shard: str, problems: Problems) -> dict[str, TensorEntry] | None:
    """The tensors of one shard; None if the file cannot be read at all."""
    if not is_file_name(shard):
        problems.add(f"{INDEX}: {shard!r} is not the name of a file in this directory")
        return None
    if not is_there(directory / shard):
        problems.add(f"{shard}: named by {INDEX}, missing")
        return None
    return read_header(directory / shard, problems)
