"""CudaBackend: captures with torch.cuda.CUDAGraph, begun and ended by hand since a call may break.

One side stream per backend: the allocator keeps free blocks per stream, so only captures of the
same stream share memory. Captures watch this thread only: a server's others are not restricted.
"""

import ctypes
import gc
import sys
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from graphs.protocol import GraphHooks, GraphPool, GraphSession
from graphs.weak import V, map_tensors, weak_view


class CudaBackend:
    """Captures on one CUDA device; see GraphBackend."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def new_pool(self) -> GraphPool:
        return CudaPool(self)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self.device)
        if outer == self._stream:
            yield
            return
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def release(self, collect: bool = True) -> None:
        """Return cached blocks, and the pools that no graph holds, to the driver."""
        if collect:
            gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


class CudaPool:
    """A private pool of torch's allocator.

    The allocator forgets a pool when its last graph is reset, and refuses its id from then on. So
    that no empty or failed first graph ends the pool, an empty graph anchors it until `close`.
    """

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._handle = torch.cuda.graph_pool_handle()
        self._anchor: torch.cuda.CUDAGraph | None = None
        self.is_capturing_enabled = True
        self.hooks = GraphHooks()
        self._broken: list[tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph | None]] = []

    @contextmanager
    def session(
        self, owner: Hashable, *, collect: bool = True, is_last: bool = True
    ) -> Iterator[GraphSession]:
        with self._backend.side_stream(), _no_automatic_gc():
            if collect:
                self._backend.release()
            if self._anchor is None:
                self._anchor = self.begin()
                self.end(self._anchor)
            session = CudaSession(self)
            try:
                yield session
            except BaseException:
                session.abort()
                raise

    def weaken(self, value: V) -> V:
        """Weak views of every CUDA tensor: torch does not tell which of them lie in the pool."""
        return map_tensors(lambda tensor: weak_view(tensor) if tensor.is_cuda else tensor, value)

    def num_bytes(self) -> int:
        # not the device's free memory, which other processes change; without the driver's nodes
        with _unharmed(self._handle):
            segments = torch.cuda.memory_snapshot(self._handle)  # type: ignore[no-untyped-call]
        return sum(int(segment["total_size"]) for segment in segments)

    def close(self) -> None:
        if self._anchor is not None:
            self._anchor.reset()
            self._anchor = None
        self._handle = torch.cuda.graph_pool_handle()

    def begin(self) -> torch.cuda.CUDAGraph:
        """Begin a graph on the current stream; it keeps its template, whose nodes are counted."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        return graph

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End it, without torch's warning: empty graphs are expected here."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()

    def abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a graph that an error cut short; stream and allocator are then as before it."""
        try:
            self.end(graph)
        except RuntimeError:
            # The capture was invalid already, and torch records into this id as long as the graph
            # lives: keep the graph, and give later captures an id of their own.
            self._broken.append((graph, self._anchor))
            self._anchor = None
            self._handle = torch.cuda.graph_pool_handle()
        else:
            graph.reset()


class CudaSession:
    def __init__(self, pool: CudaPool) -> None:
        self._pool = pool
        self._open: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        assert self._open is None, "the last graph has not ended"
        self._open = self._pool.begin()

    def end(self) -> torch.cuda.CUDAGraph | None:
        """The work since `begin`; None if no node was captured: no launch for nothing."""
        graph = self._open
        assert graph is not None, "no graph has begun"
        self._pool.end(graph)
        self._open = None
        if _num_nodes(graph) == 0:
            graph.reset()
            return None
        graph.instantiate()
        return graph

    def abort(self) -> None:
        graph = self._open
        self._open = None
        if graph is not None:
            self._pool.abandon(graph)


@contextmanager
def _no_automatic_gc() -> Iterator[None]:
    """A collection during a capture could free a graph or an event, and so break the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _unharmed(numbers: tuple[int, ...]) -> Iterator[None]:
    """Give back the references that a call of torch drops without holding them.

    memory_snapshot does with the numbers of a pool's id (torch 2.11). Those up to 256 live for
    ever, others would be freed under the id: the 257th pool of a process ended it.
    """
    held = list(numbers)
    before = [sys.getrefcount(held[i]) for i in range(len(held))]
    try:
        yield
    finally:
        for i, count in enumerate(before):
            while sys.getrefcount(held[i]) < count:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held[i]))


_open_library = cache(ctypes.CDLL)


def _num_nodes(graph: torch.cuda.CUDAGraph) -> int:
    count = ctypes.c_size_t()
    # torch does not count nodes; the driver is loaded wherever there is a GPU
    driver = _open_library("libcuda.so.1")
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    status = driver.cuGraphGetNodes(handle, None, ctypes.byref(count))
    if status != 0:
        raise RuntimeError(f"cuGraphGetNodes failed with driver error {status}")
    return count.value
