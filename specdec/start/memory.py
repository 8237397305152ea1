"""The plan of a GPU's memory: weights, the largest step, graphs, and the cache, which gets the
rest.

It is made before the cache is allocated: step and graphs are measured on a trial runner with a
cache of one block. A budget that does not fit is refused, with what to lower.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from graphs.frozen_heap import frozen_heap
from specdec.requests.params import EVERYTHING, GREEDY
from specdec.runner import Runner
from specdec.sizes import BLOCK_SIZE, IDLE, PLAIN, EngineSizes
from specdec.start.compile_ahead import padding_parts
from specdec.start.device import release_memory
from specdec.start.row_counts import lengths_of
from specdec.start.sizing import GIB

Build = Callable[[EngineSizes], Runner]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """Bytes on one device, the cache excepted."""

    total: int  # of the device
    weights: int  # of both models
    other: int  # buffers, driver, kernels, other processes
    step: int  # the peak of the largest step
    logits: int  # the part of `step` that vocabulary and rows decide
    pools: Mapping[str, int]  # graphs, by family
    block: int  # one block in both caches

    @property
    def without_cache(self) -> int:
        return self.weights + self.other + self.step + sum(self.pools.values())


def memory_table(needs: MemoryNeeds, utilization: float, num_blocks: int) -> str:
    """Write what goes where, in GiB."""
    rows = [
        ("weights", needs.weights),
        ("buffers, driver, others", needs.other),
        (f"largest step, logits {needs.logits / GIB:.2f}", needs.step),
        *((f"graphs {name}", size) for name, size in needs.pools.items()),
        (f"cache: {num_blocks} blocks, {num_blocks * BLOCK_SIZE} tokens", num_blocks * needs.block),
        ("free", needs.total - needs.without_cache - num_blocks * needs.block),
        (f"device, {utilization:.0%} to be used", needs.total),
    ]
    return "\n".join(f"{name:<44}{size / GIB:9.2f} GiB" for name, size in rows)


def of_all_ranks(needs: MemoryNeeds, least: Callable[[int], int]) -> MemoryNeeds:
    """Take the smallest device of all ranks, and the most that one of them needs, of each kind.

    least: finds the least of all ranks' values; one rank has its own
    """

    def most(value: int) -> int:
        return -least(-value)

    return replace(
        needs,
        total=least(needs.total),
        weights=most(needs.weights),
        other=most(needs.other),
        step=most(needs.step),
        pools={name: most(size) for name, size in needs.pools.items()},
    )


def plan_memory(needs: MemoryNeeds, utilization: float, sizes: EngineSizes) -> int:
    """Count the blocks that the budget leaves, up to those of `sizes`; ValueError if too few."""
    budget = int(needs.total * utilization)
    blocks = (budget - needs.without_cache) // needs.block
    if blocks < sizes.blocks_per_request:
        least = needs.without_cache + sizes.blocks_per_request * needs.block
        raise ValueError(
            f"gpu_memory_utilization={utilization} of {needs.total / GIB:.2f} GiB is "
            f"{budget / GIB:.2f} GiB; weights {needs.weights / GIB:.2f}, others "
            f"{needs.other / GIB:.2f}, the largest step {needs.step / GIB:.2f}, graphs "
            f"{sum(needs.pools.values()) / GIB:.2f} and a cache for one request of max_model_len="
            f"{sizes.max_model_len} need {least / GIB:.2f} GiB: {_advice(needs, sizes)}"
        )
    return min(blocks, sizes.num_kv_blocks)


def _advice(needs: MemoryNeeds, sizes: EngineSizes) -> str:
    batched = sizes.max_num_batched_tokens
    seqs = sizes.max_num_seqs
    fewer_graphs = "give fewer cuda_graph_sizes and cuda_graph_token_sizes, or enforce_eager=True"
    costs = {
        f"lower max_model_len={sizes.max_model_len}": sizes.blocks_per_request * needs.block,
        f"lower max_num_batched_tokens={batched} or max_num_seqs={seqs}": needs.step,
        fewer_graphs: sum(needs.pools.values()),
    }
    largest_first = sorted(costs, key=lambda advice: -costs[advice])
    return "; ".join([*largest_first, "or raise gpu_memory_utilization"])


def measure_needs(
    build: Build, sizes: EngineSizes, tensors: Iterable[Tensor], block: int, vocab_size: int
) -> MemoryNeeds:
    """Run the largest steps and capture the largest graphs on a trial runner; none of it stays.

    tensors: the weights on the device. block: bytes of one block in both caches.
    """
    trial = build(replace(sizes, num_kv_blocks=1))
    device = trial.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with frozen_heap():
        with trial.target.model.shortened():  # layers use one memory in turn
            run_largest_steps(trial)
        step = torch.cuda.max_memory_allocated(device) - before
        pools = trial.measure()
    release_memory()
    # counts the trial's buffers, which the real runner will have too
    free, total = torch.cuda.mem_get_info(device)
    storages = [tensor.untyped_storage() for tensor in tensors]
    weights = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return MemoryNeeds(
        total=total,
        weights=weights,
        other=total - free - weights,
        step=step,
        logits=sizes.max_verify_rows * vocab_size * torch.float32.itemsize,
        pools=pools,
        block=block,
    )


def run_largest_steps(runner: Runner) -> None:
    """Run the most rows of prompts with what may verify beside them; and the widest round.

    Their requests have no state rows.
    """
    sizes = runner.sizes
    parts = padding_parts(runner, lengths_of(sizes, sizes.max_num_batched_tokens))
    bound = sizes.max_model_len
    all_rows = [-1] * sizes.max_num_seqs
    rows = all_rows[len(parts) :]
    for needs in (GREEDY, EVERYTHING):
        run = partial(runner.run_step, max_num_computed=bound, flags=needs)
        run(rows, parts, shared_rows=_shared(sizes, len(rows)))
        run(all_rows, shape=PLAIN, next_shape=IDLE)
        run(all_rows, shared_rows=_shared(sizes, len(all_rows)))
        runner.read(sizes.max_num_seqs)
        if sizes.has_both:
            with_trees = all_rows[: sizes.max_tree_requests]
            shape = sizes.shape_of(len(with_trees), is_wide=True)
            run(with_trees, shape=shape, next_shape=shape)


def _shared(sizes: EngineSizes, num_verified: int) -> int:
    """Bound the rows that are shared out among that many requests; 0 where none are."""
    if not sizes.is_adaptive:
        return 0
    return min(num_verified * sizes.query_len, sizes.max_verify_rows)
