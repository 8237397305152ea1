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
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from specdec.parallel.exchange import Exchange
from specdec.parallel.processes import NO_MULTICAST
from weights.shard import Shard

# the start of one rank may wait for that of another; who fails is found by watching processes
PATIENCE = timedelta(minutes=30)
CLOSING_SECONDS = 5.0
# Rows up to which parts are gathered whole. A gather moves n float32 rows to each rank and takes
# one transfer; dealing moves 1 + 1/2 of them at most and takes two, of some microseconds each. On
# NVLink both are even at some dozens of rows of 4,096 numbers; results are the same bits.
BORDER = 64


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

    def exchange(self, poisons: bool) -> Exchange:
        """Make what models exchange parts by. poisons: see Exchange"""
        least = (self.size - 1) ** 2
        return Exchange(Shard(self.rank, self.size), self.name, max(BORDER, least), poisons)

    def gather(self, own: Tensor, out: Tensor) -> None:
        """Copy `own` of every rank, [...], to `out` of each, [n, ...], by rank; both contiguous."""
        self._group._allgather_base(out.view(-1), own.view(-1)).wait()

    def least(self, value: int) -> int:
        """Find the least of all ranks' values."""
        found = torch.empty(self.size, dtype=torch.int64, device=self._device)
        self.gather(torch.tensor([value], device=self._device), found)
        return int(found.min())

    def abort(self) -> None:
        """End what waits for another rank, which has failed: it raises an error, in its thread."""
        if self._device.type != "cuda":
            self._group.abort()
            return
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
