"""A backend without a GPU: records the ops of a call and replays them into the same memory.

TapeBackend keeps what matters of CUDA graphs: numbers and branches are frozen, addresses are fixed,
a capture computes nothing, results are garbage until the first replay and after the replay of
another capture, and host reads are errors. It does not model streams, the reuse of memory inside a
pool, or kernels that torch does not dispatch.
"""

import gc
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from weakref import WeakSet

import torch
from torch import Tensor

from graphs.protocol import CaptureError, GraphHooks, GraphPool, GraphSession
from graphs.tape.host_reads import ForbidHostReads
from graphs.tape.memory import OwnerMemory
from graphs.tape.record import Recorder
from graphs.weak import V, map_tensors, weak_view


class TapeBackend:
    """Captures on the tape, as GraphBackend says; `capacity` stands for the memory of a device."""

    name = "tape"

    def __init__(self, capacity: int = 1 << 34) -> None:
        self._capacity = capacity
        self._pools: WeakSet[TapePool] = WeakSet()

    def new_pool(self) -> GraphPool:
        pool = TapePool()
        self._pools.add(pool)
        return pool

    def side_stream(self) -> AbstractContextManager[None]:
        """Nothing: a CPU has one stream."""
        return nullcontext()

    def free_memory(self) -> int:
        return self._capacity - sum(pool.num_bytes() for pool in self._pools)

    def release(self, collect: bool = True) -> None:
        if collect:
            gc.collect()


class TapePool:
    """Owners that poison each other's results."""

    def __init__(self) -> None:
        self._owners: dict[Hashable, OwnerMemory] = {}
        self._last: OwnerMemory | None = None
        self.is_capturing_enabled = True
        self.hooks = GraphHooks()

    @contextmanager
    def session(
        self, owner: Hashable, *, collect: bool = True, is_last: bool = True
    ) -> Iterator[GraphSession]:
        if collect:
            gc.collect()
        memory = self._owners.setdefault(owner, OwnerMemory())
        session = TapeSession(self, memory)
        try:
            yield session
        except BaseException:
            session.abort()
            memory.end_capture()
            self._drop_unused(memory)
            raise
        if is_last:
            memory.end_capture()

    def weaken(self, value: V) -> V:
        """Weak views of the tensors that lie in results; the pool keeps only those alive."""
        return map_tensors(lambda t: weak_view(t) if self._owns(t) else t, value)

    def close(self) -> None:
        """Forget every owner; weak views of their results dangle from here on."""
        self._owners.clear()
        self._last = None

    def begin_replay(self, memory: OwnerMemory) -> None:
        """A graph of `memory` is about to replay: the results of the last owner are lost."""
        if self._last is not None and self._last is not memory:
            self._last.poison()
        self._last = memory

    def drop(self, memory: OwnerMemory) -> None:
        """A graph of this owner was reset; with its last graph the results are freed."""
        memory.num_graphs -= 1
        self._drop_unused(memory)

    def _drop_unused(self, memory: OwnerMemory) -> None:
        if memory.num_graphs == 0:
            self._owners = {key: kept for key, kept in self._owners.items() if kept is not memory}
            if self._last is memory:
                self._last = None

    def num_bytes(self) -> int:
        return sum(memory.num_bytes for memory in self._owners.values())

    def pinned_bytes(self) -> int:
        """Bytes that CUDA could not share: a strong reference outside keeps them."""
        return sum(memory.pinned_bytes() for memory in self._owners.values())

    def _owns(self, tensor: Tensor) -> bool:
        return any(memory.owns(tensor) for memory in self._owners.values())


class TapeSession:
    def __init__(self, pool: TapePool, memory: OwnerMemory) -> None:
        self._pool = pool
        self._memory = memory
        self._stack = ExitStack()
        self._recorder: Recorder | None = None

    def begin(self) -> None:
        assert self._recorder is None, "the last graph has not ended"
        self._recorder = Recorder(self._memory)
        self._stack.enter_context(ForbidHostReads())
        self._stack.enter_context(self._recorder)

    def end(self) -> "TapeGraph | None":
        recorder = self._recorder
        assert recorder is not None, "no graph has begun"
        if recorder.inside is not None:
            problem = f"an eager break inside the captured op {recorder.inside}"
            raise CaptureError(f"{problem}: the break must be outermost")
        self.abort()
        if not recorder.calls:
            return None
        self._memory.num_graphs += 1
        return TapeGraph(self._pool, self._memory, recorder)

    def abort(self) -> None:
        self._recorder = None
        self._stack.close()


class TapeGraph:
    """Recorded calls, in order, and the storages of their inputs."""

    def __init__(self, pool: TapePool, memory: OwnerMemory, recorder: Recorder) -> None:
        self._pool = pool
        self._memory = memory
        self._calls = recorder.calls
        self._inputs = list(recorder.inputs.values())

    def replay(self) -> None:
        """Make the calls again, unless an input is gone."""
        for name, storage in self._inputs:
            if storage.expired():  # type: ignore[no-untyped-call]
                problem = f"an input of {name} was freed after the capture"
                raise CaptureError(f"{problem}: captured inputs are static buffers")
        self._pool.begin_replay(self._memory)
        with torch.inference_mode():
            for call in self._calls:
                call()

    def reset(self) -> None:
        if self._calls:
            self._calls = []
            self._inputs = []
            self._pool.drop(self._memory)
