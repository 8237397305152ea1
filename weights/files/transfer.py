"""Bytes to tensors: read, and cast to one dtype.

The arranged tensors (arrange.py) are allocated first, then filled piece by piece; a tensor whose
elements change places is there twice for a moment. Scales of FP8 weights, small and many, are
arranged on the host. What a GPU takes as it is stored goes through
pinned memory: threads read chunks into buffers that take turns, and
the GPU copies. From pageable memory the
driver copies one piece after another, however many threads ask: 16 GB take 1.6 s with 1 to 16
threads, and 0.5 s this way (H200, files in the page cache).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from weights.arrange import Arrangement, arrange
from weights.bars import bar
from weights.files.header import TORCH_DTYPES, TensorEntry
from weights.files.part import Part
from weights.files.reader import Reader, as_bytes
from weights.fp8 import check, fill, is_scale, weight_of
from weights.report import Log
from weights.shapes import Shapes

THREADS = 8
BUFFERS = 2 * THREADS
CHUNK = 8 << 20  # bytes of a buffer
SOME = 16  # experts whose elements change places at a time


def read_tensors(
    reader: Reader,
    wanted: Shapes,
    held: dict[str, TensorEntry],
    log: Log,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: bool,
    parts: Mapping[str, Part],
) -> dict[str, Tensor]:
    """Everything in `wanted` as `arrange` names it; `log` notes casts, a terminal shows a bar.

    parts: the part of each tensor of which not all is wanted
    """
    plan = arrange(wanted)
    tensors = plan.empty(dtype, device)
    places = plan.pieces(tensors)
    sizes = {
        name: math.prod(wanted[name]) * reader.dtype(held[name].name).itemsize for name in places
    }
    options = {"total": sum(sizes.values()), "unit": "B", "unit_scale": True}
    with bar(is_wanted=progress, desc=reader.directory.name, **options) as shown:
        jobs: list[CopyJob] = []
        for name, place in places.items():
            key, part = held[name].name, parts.get(name)
            if name in plan.moves or is_scale(name):
                continue
            if place.is_cuda and place.dtype == reader.dtype(key):
                jobs.append(CopyJob(reader, key, 0, as_bytes(place), part))
            else:
                reader.read_into(key, place, part)
                shown.update(sizes[name])
        for num_bytes in copy_all(jobs, torch.device(device)) if jobs else ():
            shown.update(num_bytes)
        for name, move in plan.moves.items():
            stored = _read(reader, held[name].name, device, parts.get(name))
            for first in range(0, len(stored), SOME):
                places[name][first : first + SOME] = move.run(stored[first : first + SOME])
            shown.update(sizes[name])
        _read_scales(reader, plan, tensors, held, parts)
        shown.update(sum(size for name, size in sizes.items() if is_scale(name)))
    _note_casts(wanted, held, plan, dtype, log)
    return tensors


def _read(reader: Reader, key: str, device: torch.device | str, part: Part | None) -> Tensor:
    """Read a tensor as it is stored."""
    if torch.device(device).type == "cpu":
        return reader.read(key, device, part)
    entry = reader.entries[key]
    shape = entry.shape if part is None else part.shape_in(entry.shape)
    stored = torch.empty(shape, dtype=reader.dtype(key), device=device)
    for _ in copy_all([CopyJob(reader, key, 0, as_bytes(stored), part)], torch.device(device)):
        pass
    return stored


def _read_scales(
    reader: Reader,
    plan: Arrangement,
    tensors: dict[str, Tensor],
    held: dict[str, TensorEntry],
    parts: Mapping[str, Part],
) -> None:
    """Fill the scales of FP8 weights; those that are no positive numbers are problems."""
    names = [name for name in plan.places if is_scale(name)]
    wholes = dict.fromkeys(plan.places[name].whole for name in names)
    on_host = {whole: torch.empty(plan.shapes[whole]) for whole in wholes}
    places = plan.pieces(tensors | on_host)
    for name in names:
        entry = held[name]
        stored = reader.read(entry.name)
        check(stored, entry.where, reader.problems)
        fill(places[name], stored, parts.get(weight_of(name)))
    for whole, filled in on_host.items():
        tensors[whole].copy_(filled)


def _note_casts(
    wanted: Shapes,
    held: dict[str, TensorEntry],
    plan: Arrangement,
    dtype: torch.dtype,
    log: Log,
) -> None:
    """Note how many tensors are cast to the model's dtype."""
    cast = (name for name in wanted if plan.places[name].whole not in plan.dtypes)
    for kind, count in Counter(held[name].dtype for name in cast).items():
        if TORCH_DTYPES[kind] != dtype:
            new = str(dtype).removeprefix("torch.")
            log.note(f"{count} tensors stored as {kind} are cast to {new}")


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Copy the bytes of a tensor from byte `start` of it on to the uint8 tensor `out`.

    part: whose bytes these are, instead of the whole tensor's
    """

    reader: Reader
    name: str
    start: int
    out: Tensor
    part: Part | None = None

    def chunks(self) -> Iterator["CopyJob"]:
        for first in range(0, len(self.out), CHUNK):
            out = self.out[first : first + CHUNK]
            yield CopyJob(self.reader, self.name, self.start + first, out, self.part)


def copy_all(jobs: Sequence[CopyJob], device: torch.device) -> Iterator[int]:
    """Run all jobs on several threads and yield the size of each chunk; all are done at the end."""
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.synchronize(device)  # nothing earlier may still use the tensors' memory
    free: SimpleQueue[tuple[Tensor, torch.cuda.Stream | None]] = SimpleQueue()
    for buffer in torch.empty(BUFFERS, CHUNK, dtype=torch.uint8, pin_memory=is_gpu):
        free.put((buffer, torch.cuda.Stream(device) if is_gpu else None))  # type: ignore[no-untyped-call]

    def copy(chunk: CopyJob) -> int:
        buffer, stream = free.get()
        try:
            if stream is not None:
                stream.synchronize()  # the buffer's previous bytes have arrived
            stored = buffer[: len(chunk.out)]
            chunk.reader.read_bytes(chunk.name, chunk.start, stored, chunk.part)
            with torch.cuda.stream(stream):
                chunk.out.copy_(stored, non_blocking=True)
            return len(stored)
        finally:
            free.put((buffer, stream))  # last in the queue: by its next turn the buffer is empty

    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(copy, [chunk for job in jobs for chunk in job.chunks()])
    if is_gpu:
        torch.cuda.synchronize(device)
