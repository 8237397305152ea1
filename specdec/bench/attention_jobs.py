"""Queries, caches and rows of one layer's attention, in a model's shapes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.bench.pair import Pair
from specdec.bench.timing import CACHES
from specdec.kernels.attention.query_rows import QueryRows, plan_tiles
from specdec.kernels.attention.workspace import workspace_size
from specdec.sizes import BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The last `rows` of `context` positions ask, of each of `batch` requests."""

    batch: int
    rows: int
    context: int

    @property
    def is_prompt(self) -> bool:
        return self.rows == self.context > 1


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
        """Keys and values that one layer reads."""
        return 2 * job.batch * job.context * self.G * self.C * self.dtype.itemsize

    def num_copies(self, job: Job) -> int:
        is_gpu = self.device.type == "cuda"
        return -(-CACHES // self.bytes_of(job)) if is_gpu and not job.is_prompt else 1

    def fits(self, job: Job) -> bool:
        """Whether a GPU has room for all copies twice, paged and contiguous."""
        if self.device.type != "cuda":
            return True
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        wanted = 2.2 * self.num_copies(job) * self.bytes_of(job)
        return wanted + 2 * self.bytes_of(job) < 0.95 * free


def query_rows(layer: LayerShape, job: Job, blocks: Tensor, model_len: int) -> QueryRows:
    """Rounds on a GPU as in the engine's graphs, with room for model_len tokens.

    blocks: [batch, blocks of the context]
    """
    B, Q, L = job.batch, job.rows, job.context
    is_cpu = layer.device.type == "cpu"
    bound = L if job.is_prompt or is_cpu else max(L, model_len)
    table = torch.zeros(B + 1, -(-bound // BLOCK_SIZE), dtype=torch.int64, device=blocks.device)
    table[:B, : blocks.shape[1]] = blocks
    positions = torch.arange(L - Q, L, device=blocks.device).repeat(B)
    size = workspace_size(B * Q, layer.H, layer.C, bound) if not job.is_prompt else 1
    return QueryRows(
        block_table=table,
        idx_mapping=torch.arange(B, device=blocks.device),
        positions=positions,
        query_start_loc=torch.tensor([0, Q], device=blocks.device) if job.is_prompt else None,
        max_query_len=Q,
        max_seq_len=bound,
        tiles=plan_tiles([Q] * B, B * Q, blocks.device) if is_cpu else None,
        workspace=torch.empty(size, device=blocks.device),
    )


def caches_of(layer: LayerShape, num_blocks: int, num_copies: int) -> list[Tensor]:
    """[2, N + 1, G, S, C] each, all the same."""
    first = layer.random(2, num_blocks + 1, layer.G, BLOCK_SIZE)
    return [first, *(first.clone() for _ in range(num_copies - 1))]


def contiguous(cache: Tensor, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, G, L, C]."""
    _, _, G, _, C = cache.shape
    kv = cache[:, blocks].transpose(2, 3).reshape(2, len(blocks), G, -1, C)  # [2, B, G, M x S, C]
    k, v = kv[:, :, :, :length].contiguous()
    return k, v
