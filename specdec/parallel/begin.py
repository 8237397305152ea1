"""How an engine of several ranks begins: what is refused, and what each rank is told first."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch

from graphs.addresses import debug_enabled
from specdec.config import EngineConfig
from specdec.parallel.lead import Lead
from specdec.parallel.processes import Processes
from specdec.parallel.shared import Shared
from specdec.speculative_config import SpeculativeConfig
from specdec.start.speculation import Drafting

logger = logging.getLogger("specdec")


class Found(NamedTuple):
    """Says what rank 0 has found out before weights are read. draft: None without one."""

    target: Path
    draft: Path | None
    speculation: SpeculativeConfig | None
    drafting: Drafting

    @property
    def has_draft(self) -> bool:
        return self.drafting.num_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """Tells a rank's process what it is; pickled, by this package alone.

    file, store: the descriptors of shared memory, and of the group's store
    parent: the process of rank 0
    config: with the rank's own device
    """

    file: int
    store: int
    rank: int
    size: int
    parent: int
    num_threads: int
    compares: bool
    found: Found
    config: EngineConfig


def check_ranks(device: torch.device, size: int) -> str:
    """Return the device of rank 0; ValueError for ranks that have no device, or no way to it."""
    given = f"tensor_parallel_size={size}"
    if device.type == "cpu":
        return "cpu"
    if device.index is not None:
        advice = "leave it out, and choose GPUs by CUDA_VISIBLE_DEVICES"
        raise ValueError(f"device='{device}' with {given}: ranks take the first GPUs: {advice}")
    count = torch.cuda.device_count()
    if size > count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        gpus = "one GPU" if count == 1 else f"{count} GPUs"
        raise ValueError(f"{given}: torch sees {gpus} here{why}: give at most {count}")
    for one, other in combinations(range(size), 2):
        both = torch.cuda.can_device_access_peer(one, other)
        if not both or not torch.cuda.can_device_access_peer(other, one):
            raise ValueError(
                f"{given}: GPUs {one} and {other} cannot reach each other's memory: choose others "
                "by CUDA_VISIBLE_DEVICES; one GPU works"
            )
    names = [torch.cuda.get_device_name(rank) for rank in range(size)]
    if len({*names}) > 1:
        logger.warning("%s: GPUs differ (%s): the slowest sets the pace", given, ", ".join(names))
    return "cuda:0"


@contextmanager
def leading(found: Found, config: EngineConfig) -> Iterator[Lead | None]:
    """Start the other ranks, None if there are none; they end if the body fails.

    With SPECDEC_DEBUG=1 ranks compare the results of each step, and receive into what is poisoned.
    """
    size, compares = config.tensor_parallel_size, debug_enabled()
    if size == 1:
        yield None
        return
    shared = Shared.of(size)
    store = os.memfd_create("specdec-store")
    common = RankStart(
        file=shared.file,
        store=store,
        rank=0,
        size=size,
        parent=os.getpid(),
        num_threads=max(torch.get_num_threads() // size, 1),  # they share a host's cores
        compares=compares,
        found=found,
        config=replace(config, use_tqdm_on_load=False),
    )
    starts = [_start(rank, common) for rank in range(1, size)]
    lead = Lead(Processes(shared, starts, [store]), store, compares)
    try:
        yield lead
    except ValueError as error:  # what a user gave; that another rank has ended raises no such
        lead.processes.fail(f"the start was refused: {error}")
        raise
    except BaseException as error:
        lead.fail_after(error)
        raise


def _start(rank: int, common: RankStart) -> RankStart:
    device = "cpu" if common.config.device == "cpu" else f"cuda:{rank}"
    return replace(common, rank=rank, config=replace(common.config, device=device))
