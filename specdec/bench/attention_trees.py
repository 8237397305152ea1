"""What attention over a draft tree costs, beside a round of verified chains."""

from functools import partial

import torch

from specdec.bench.attention_jobs import Job, LayerShape, caches_of, query_rows
from specdec.bench.timing import per_call_ms
from specdec.kernels.attention.launch import paged_attention
from specdec.kernels.attention.query_rows import Paths, QueryRows
from specdec.sizes import BLOCK_SIZE

CHILDREN = 4  # of each node


@torch.inference_mode()
def tree_ms(layer: LayerShape, job: Job, model_len: int) -> float:
    """Time a layer in milliseconds.

    job: a tree of `rows` nodes after `context` keys, each node with CHILDREN children
    """
    num_blocks = -(-job.context // BLOCK_SIZE) + -(-job.rows // BLOCK_SIZE)
    caches = caches_of(layer, num_blocks, layer.num_copies(job))
    q_THC = layer.random(job.rows, layer.H)
    out_THC = torch.empty_like(q_THC)
    rows = _rows_of_tree(layer, job, model_len)
    calls = [partial(paged_attention, q_THC, out_THC, cache, rows) for cache in caches]
    return per_call_ms(layer.device, calls)


def _rows_of_tree(layer: LayerShape, job: Job, model_len: int) -> QueryRows:
    """Put the nodes into random slots of the blocks after those of the context."""
    N, L = job.rows, job.context
    num_blocks = -(-L // BLOCK_SIZE)
    blocks = torch.arange(num_blocks, device=layer.device)[None]
    slots = num_blocks * BLOCK_SIZE + torch.randperm(N)
    paths = [_path(node) for node in range(N)]
    D1 = max(map(len, paths))
    named = torch.full((N, D1), -1)
    for node, path in enumerate(paths):
        named[node, : len(path)] = slots[path]
    positions = torch.tensor([L + len(path) - 1 for path in paths], device=layer.device)
    starts = torch.tensor([L], device=layer.device)
    end = Job(batch=1, rows=N, context=L + D1)
    found = Paths(slots=named.to(layer.device), starts=starts)
    return query_rows(layer, end, blocks, model_len, positions, found)


def _path(node: int) -> list[int]:
    """List the nodes from the root to this one."""
    return [*(_path((node - 1) // CHILDREN) if node else ()), node]
