"""One layer's attention: ours over the paged cache, and the fastest others over contiguous keys.

Rounds and prompts, with the same queries, keys and values for all; a yardstick whose
result differs is no yardstick and has its error in place of a time. On a GPU each is a captured
chain over as many copies of the keys as no cache holds, as a round reads them: between two passes
over a layer's keys lie all other weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from specdec.bench.bench import Bench
from specdec.bench.pair import Pair
from specdec.bench.report import Row
from specdec.bench.timing import CACHES, per_call_ms
from specdec.bench.yardsticks import Yardstick, first_line, yardsticks
from specdec.kernels.attention.arguments import workspace_size
from specdec.kernels.attention.launch import paged_attention
from specdec.kernels.attention.query_rows import QueryRows, plan_tiles
from specdec.sizes import BLOCK_SIZE

# contexts, requests and rows of each of rounds, and lengths of prompts, by device
SIZES = {
    "cuda": ((300, 4096, 16384, 32768), (1, 8, 64), (1, 4, 6), (2048, 8192)),
    "cpu": ((70, 130), (1, 2), (1, 3), (66,)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The last `rows` of `context` positions ask, of each of `batch` requests."""

    batch: int
    rows: int
    context: int

    @property
    def is_prompt(self) -> bool:
        return self.rows == self.context > 1


def attention(bench: Bench) -> Iterator[Row]:
    """Time one layer's attention, ours and the fastest that can be installed."""
    bench.pair.drop()
    contexts, batches, counts, prompts = SIZES[bench.pair.device.type]
    sizes = product(contexts, batches, counts)
    jobs = [Job(batch=B, rows=Q, context=L) for L, B, Q in sizes]
    jobs += [Job(batch=1, rows=T, context=T) for T in prompts]
    for job in jobs:
        what = f"attention: batch {job.batch}, {job.rows} rows, context {job.context}"
        if bench.has_time(what):
            try:
                yield compared(bench, job)
            except torch.OutOfMemoryError:
                bench.skipped.append(f"{what}: more keys than fit into memory")


class LayerShape:
    """The shapes of a model's attention, and where its keys lie."""

    def __init__(self, pair: Pair) -> None:
        layer = pair.target.config.layer
        self.H = layer.num_heads
        self.G = layer.num_kv_heads
        self.C = layer.head_dim
        self.dtype = pair.target.tensors["embed_tokens.weight"].dtype
        self.device = pair.device

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, self.C, dtype=self.dtype, device=self.device)

    def bytes_of(self, job: Job) -> int:
        """Count keys and values that one layer reads."""
        return 2 * job.batch * job.context * self.G * self.C * self.dtype.itemsize

    def caches_of(self, job: Job) -> list[Tensor]:
        """Make equal caches [2, N + 1, G, S, C]: more of a round than a GPU's caches hold."""
        is_cold = self.device.type == "cuda" and not job.is_prompt
        num_copies = -(-CACHES // self.bytes_of(job)) if is_cold else 1
        num_blocks = job.batch * -(-job.context // BLOCK_SIZE)
        first = self.random(2, num_blocks + 1, self.G, BLOCK_SIZE)
        return [first, *(first.clone() for _ in range(num_copies - 1))]


@torch.inference_mode()
def compared(bench: Bench, job: Job) -> Row:
    """Time ours, and each yardstick over the same keys."""
    layer = LayerShape(bench.pair)
    B, Q, L = job.batch, job.rows, job.context
    caches = layer.caches_of(job)
    blocks = torch.randperm(caches[0].shape[1] - 1, device=layer.device).view(B, -1)
    q_THC = layer.random(B * Q, layer.H)
    out_THC = torch.empty_like(q_THC)
    rows = query_rows(layer, job, blocks, bench.options.model_len)
    calls = [partial(paged_attention, q_THC, out_THC, cache, rows) for cache in caches]
    ours = per_call_ms(layer.device, calls)
    q = q_THC.view(B, Q, layer.H, layer.C).transpose(1, 2).contiguous()
    expected = out_THC.view(B, Q, layer.H, layer.C).transpose(1, 2)  # of the last copy
    kv = [contiguous(cache, blocks, L) for cache in caches]
    del caches, calls
    times: dict[str, float] = {}
    errors: dict[str, str] = {}
    for name, yardstick in yardsticks(layer.device).items():
        try:
            times[name] = _yardstick_ms(yardstick, q, kv, expected)
        except (RuntimeError, ValueError) as error:  # in the row, beside the others' times
            errors[name] = first_line(error)
    best = min(times, key=times.__getitem__, default=None)
    speed = layer.bytes_of(job) / ours * 1e3
    return {
        "what": "prompt" if job.is_prompt else "round",
        "batch": B,
        "rows": Q,
        "context": L,
        "ms_per_layer": ours,
        "gb_per_s": speed / 1e9,
        "of_bandwidth": speed / bench.bandwidth,
        "yardstick": best,
        "yardstick_ms": times.get(str(best)),
        "against_yardstick": None if best is None else ours / times[best],
        **{f"{name}_ms": times.get(name) for name in yardsticks(layer.device)},
        "errors": "; ".join(f"{name}: {error}" for name, error in errors.items()) or None,
    }


def _yardstick_ms(
    yardstick: Yardstick, q: Tensor, kv: Sequence[tuple[Tensor, Tensor]], expected: Tensor
) -> float:
    """Time it; RuntimeError if its last rows differ (the others may: see flash_packed)."""
    attend = yardstick(q, kv[0][0])
    calls = [partial(attend, q, k, v) for k, v in kv]
    found = calls[-1]()[:, :, -1].float()
    difference = (found - expected[:, :, -1]).abs().max() / expected[:, :, -1].abs().max()
    if not difference < 0.05:
        raise RuntimeError(f"differs from ours by {difference:.1%} of the largest value")
    return per_call_ms(q.device, calls)


def query_rows(layer: LayerShape, job: Job, blocks: Tensor, model_len: int) -> QueryRows:
    """Describe rounds on a GPU as the engine's graphs do, with room for model_len tokens.

    blocks: [batch, blocks of the context]
    """
    B, Q, L = job.batch, job.rows, job.context
    is_cpu = layer.device.type == "cpu"
    bound = L if job.is_prompt or is_cpu else max(L, model_len)
    table = torch.zeros(B + 1, -(-bound // BLOCK_SIZE), dtype=torch.int64, device=blocks.device)
    table[:B, : blocks.shape[1]] = blocks
    size = workspace_size(B * Q, layer.H, layer.C, bound) if not job.is_prompt else 1
    return QueryRows(
        block_table=table,
        idx_mapping=torch.arange(B, device=blocks.device),
        positions=torch.arange(L - Q, L, device=blocks.device).repeat(B),
        query_start_loc=torch.tensor([0, Q], device=blocks.device) if job.is_prompt else None,
        max_query_len=Q,
        max_seq_len=bound,
        tiles=plan_tiles([Q] * B, B * Q, blocks.device) if is_cpu else None,
        workspace=torch.empty(size, device=blocks.device),
    )


def contiguous(cache: Tensor, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Gather keys and values [B, G, L, C]."""
    _, _, G, _, C = cache.shape
    kv = cache[:, blocks].transpose(2, 3).reshape(2, len(blocks), G, -1, C)  # [2, B, G, M x S, C]
    k, v = kv[:, :, :, :length].contiguous()
    return k, v
