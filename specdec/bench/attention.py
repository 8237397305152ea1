"""One layer's attention: ours over the paged cache, and the fastest others over contiguous keys.

Rounds and prompts, with the same queries, keys and values for all; a yardstick whose
result differs is no yardstick and has its error in place of a time. On a GPU each is a captured
chain over as many copies of the keys as no cache holds, as a round reads them: between two passes
over a layer's keys lie all other weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specdec.bench.attention_jobs import Job, LayerShape, caches_of, contiguous, query_rows
from specdec.bench.bench import Bench
from specdec.bench.report import Row
from specdec.bench.timing import per_call_ms
from specdec.bench.yardsticks import Yardstick, yardsticks
from specdec.kernels.attention.launch import paged_attention
from specdec.sizes import BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """rows: of each request of a round."""

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]


ON_GPU = Sizes(
    contexts=(300, 4096, 16384, 32768),
    rows=(1, 4, 6),
    batches=(1, 8, 64),
    prompts=(2048, 8192),
)
ON_CPU = Sizes(contexts=(70, 130), rows=(1, 3), batches=(1, 2), prompts=(66,))


def attention(bench: Bench) -> Iterator[Row]:
    """Time one layer's attention, ours and the fastest that can be installed."""
    bench.pair.drop()
    layer = LayerShape(bench.pair)
    sizes = ON_GPU if layer.device.type == "cuda" else ON_CPU
    rounds = [
        Job(batch=B, rows=Q, context=L)
        for L in sizes.contexts
        for B in sizes.batches
        for Q in sizes.rows
    ]
    prompts = [Job(batch=1, rows=T, context=T) for T in sizes.prompts]
    for job in (*rounds, *prompts):
        if _is_possible(bench, layer, job):
            yield compared(layer, job, bench.bandwidth.reading, bench.options.model_len)


def _is_possible(bench: Bench, layer: LayerShape, job: Job) -> bool:
    what = f"attention: batch {job.batch}, {job.rows} rows, context {job.context}"
    if not layer.fits(job):
        bench.skipped.append(f"{what}: more keys than fit into memory")
        return False
    return bench.has_time(what)


@torch.inference_mode()
def compared(layer: LayerShape, job: Job, bandwidth: float, model_len: int) -> Row:
    """Time ours, and each yardstick over the same keys."""
    B, Q, L = job.batch, job.rows, job.context
    num_blocks = -(-L // BLOCK_SIZE)
    caches = caches_of(layer, B * num_blocks, layer.num_copies(job))
    order = torch.randperm(B * num_blocks, device=layer.device).view(B, num_blocks)
    q_THC = layer.random(B * Q, layer.H)
    out_THC = torch.empty_like(q_THC)
    rows = query_rows(layer, job, order, model_len)
    calls = [partial(paged_attention, q_THC, out_THC, cache, rows) for cache in caches]
    ours = per_call_ms(layer.device, calls)
    q = q_THC.view(B, Q, layer.H, layer.C).transpose(1, 2).contiguous()
    expected = out_THC.view(B, Q, layer.H, layer.C).transpose(1, 2)  # of the last copy
    kv = [contiguous(cache, order, L) for cache in caches]
    del caches, calls
    times: dict[str, float] = {}
    errors: dict[str, str] = {}
    for name, yardstick in yardsticks(layer.device).items():
        try:
            times[name] = _yardstick_ms(yardstick, q, kv, expected)
        except (RuntimeError, ValueError) as error:  # in the row, beside the others' times
            errors[name] = str(error).strip().partition("\n")[0][:100]
    best = min(times, key=times.__getitem__, default=None)
    speed = layer.bytes_of(job) / ours * 1e3
    return {
        "what": "prompt" if job.is_prompt else "round",
        "batch": B,
        "rows": Q,
        "context": L,
        "ms_per_layer": ours,
        "gb_per_s": speed / 1e9,
        "of_bandwidth": speed / bandwidth,
        "yardstick": best,
        "yardstick_ms": times.get(str(best)),
        "against_yardstick": None if best is None else ours / times[best],
        **{f"{name}_ms": times.get(name) for name in yardsticks(layer.device)},
        "errors": "; ".join(f"{name}: {error}" for name, error in errors.items()) or None,
    }


def _yardstick_ms(
    yardstick: Yardstick, q: Tensor, kv: Sequence[tuple[Tensor, Tensor]], expected: Tensor
) -> float:
    """RuntimeError if it computes something else. Last rows count: see flash_packed."""
    attend = yardstick(q, kv[0][0])
    calls = [partial(attend, q, k, v) for k, v in kv]
    found = calls[-1]()[:, :, -1].float()
    difference = (found - expected[:, :, -1]).abs().max() / expected[:, :, -1].abs().max()
    if not difference < 0.05:
        raise RuntimeError(f"differs from ours by {difference:.1%} of the largest value")
    return per_call_ms(q.device, calls)
