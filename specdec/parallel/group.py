"""The ranks' process group: gloo on a CPU, NCCL on GPUs. It moves data and never adds any.

It is no default group, so a caller's own torch.distributed stays as it is. Its store is a file
without a name that all ranks inherit, and both listen to their own host alone.
"""

import ctypes
import os
import threading
import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import (
    Store,
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)

from specdec.kernels.push import BLOCK, GAVE_UP, NUMBERS, Boxes
from specdec.parallel.exchange import Exchange
from specdec.parallel.processes import NO_MULTICAST
from weights.shard import Shard

# the start of one rank may wait for that of another; who fails is found by watching processes
PATIENCE = timedelta(minutes=30)
CLOSING_SECONDS = 5.0
# numbers of float32 that a rank sends in the time of one more transfer and its reader, some 6 us
# over NVLink; on a CPU few, so that small models are exchanged both ways
BORDER, BORDER_ON_CPU = 1 << 19, 1 << 12


class Group:
    """Connects a rank with all others, which connect at about the same time.

    file: the store's descriptor. It is never closed: a store that went later would write into what
        has its number by then
    """

    def __init__(self, file: int, rank: int, size: int, device: torch.device) -> None:
        os.environ |= NO_MULTICAST
        self.rank = rank
        self.size = size
        self._device = device
        store = distributed.FileStore(f"/proc/self/fd/{file}", size)  # type: ignore[attr-defined]
        self._group: Any
        if device.type == "cuda":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = PATIENCE
            self._group = distributed.ProcessGroupNCCL(store, rank, size, options)
            self._group.eager_connect_single_device(device)
        else:
            gloo = distributed.ProcessGroupGloo
            within_host = gloo._Options()  # type: ignore[attr-defined]
            within_host._devices = [gloo.create_device(interface="lo")]
            within_host._timeout = PATIENCE
            self._group = gloo(store, rank, size, within_host)
        os.register_at_fork(after_in_child=partial(_keep, weakref.ref(self)))
        # ops find it by name; the descriptor of its store is no other group's in this process
        self.name = f"specdec-{file}"
        self._named = distributed.ProcessGroup(store, rank, size)
        kinds = distributed.ProcessGroup.BackendType
        kind = kinds.NCCL if device.type == "cuda" else kinds.GLOO
        self._named._register_backend(device, kind, self._group)
        self._named._set_default_backend(kind)
        self._named._set_group_name(self.name)  # type: ignore[arg-type]
        _register_process_group(self.name, self._named)  # type: ignore[arg-type]
        self._boxes = self._new_boxes(store) if device.type == "cuda" else None

    def exchange(self, poisons: bool) -> Exchange:
        """Make what models exchange parts by. poisons: see Exchange"""
        border = BORDER_ON_CPU if self._boxes is None else BORDER
        return Exchange(Shard(self.rank, self.size), self.name, border, self._boxes, poisons)

    def gather(self, own: Tensor, out: Tensor) -> None:
        """Copy `own` of every rank, [...], to `out` of each, [n, ...], by rank; both contiguous."""
        self._group._allgather_base(out.view(-1), own.view(-1)).wait()

    def _new_boxes(self, store: Store) -> Boxes:
        """Map the memory that ranks write into, of each rank into the others' address space."""
        _SymmetricMemory.set_group_info(self.name, self.rank, self.size, store)
        num_words = 2 * self.size * NUMBERS
        args = (num_words,), (1,), torch.int64, self._device, self.name
        self._memory = _SymmetricMemory.empty_strided_p2p(*args).zero_()
        self._mapped = _SymmetricMemory.rendezvous(self._memory, self.name)
        boxes = Boxes(
            addresses_n=torch.tensor([*self._mapped.buffer_ptrs], device=self._device),
            epochs=torch.ones(NUMBERS // BLOCK, dtype=torch.int32, device=self._device),
            stopped=torch.zeros(1, dtype=torch.int32, pin_memory=True),
            rank=self.rank,
        )
        torch.cuda.synchronize(self._device)
        self.least(0)  # all ranks' boxes are empty
        return boxes

    def least(self, value: int) -> int:
        """Find the least of all ranks' values."""
        found = torch.empty(self.size, dtype=torch.int64, device=self._device)
        self.gather(torch.tensor([value], device=self._device), found)
        return int(found.min())

    @property
    def has_given_up(self) -> bool:
        """Whether the device has waited in vain for what another rank sends."""
        return self._boxes is not None and int(self._boxes.stopped) == GAVE_UP

    def abort(self) -> None:
        """End what waits for another rank, which has failed: it raises an error, in its thread."""
        if self._device.type != "cuda":
            self._group.abort()
            return
        if self._boxes is not None and not self.has_given_up:
            self._boxes.stopped.fill_(1)
        self._aborting()

    def close(self) -> None:
        """Give back what the group holds. Graphs that captured its transfers are to be gone."""
        if self._device.type == "cuda":
            self._aborting().join(CLOSING_SECONDS)
        _unregister_process_group(self.name)  # type: ignore[arg-type]

    def _aborting(self) -> threading.Thread:
        """Abort in a thread: NCCL ends its kernels at once, then waits for graphs to be gone."""
        thread = threading.Thread(target=self._group.abort, name="specdec-abort", daemon=True)
        thread.start()
        return thread


def _keep(found: "weakref.ref[Group]") -> None:
    """Keep a group for good in a forked child, whose end would wait for threads that it lacks."""
    group = found()
    if group is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group._group))


class Joined:
    """Has what every rank has from its group, once it has joined. compares: see Lead"""

    def __init__(self, rank: int, size: int, compares: bool) -> None:
        self.rank = rank
        self.size = size
        self._compares = compares
        self._group: Group | None = None

    @property
    def shard(self) -> Shard:
        """Say which part of the models this rank reads."""
        return Shard(self.rank, self.size)

    @property
    def exchange(self) -> Exchange:
        """Give what the models of joined ranks exchange parts by."""
        assert self._group is not None, "ranks that have not joined"
        return self._group.exchange(poisons=self._compares)

    def least(self, value: int) -> int:
        """Find the least of all ranks' values."""
        assert self._group is not None, "ranks that have not joined"
        return self._group.least(value)

    @property
    def waits_in_vain(self) -> str:
        """Say that this rank's device has given up waiting for another; else empty."""
        if self._group is None or not self._group.has_given_up:
            return ""
        return f"rank {self.rank}'s GPU has waited in vain for what another rank sends"
