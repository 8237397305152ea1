"""One callable, one captured form of it for each batch descriptor that it is called with.

Both wrappers trust mode and descriptor of the forward context: in another mode than theirs they run
the callable directly, which makes nesting legal; a new descriptor captures; a known one replays and
returns the stored output. They own no buffers, copy no inputs and do no warm-up: the caller does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from graphs.addresses import addresses, check_addresses, debug_enabled
from graphs.breakable import BreakableCUDAGraphCapture
from graphs.capturing import exclusive_capture
from graphs.context import ForwardContext, context_in
from graphs.counters import log_capture
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.protocol import Graph, GraphPool

Captured: TypeAlias = tuple[Graph | None, object]  # what replays a call, and what it returned


@dataclass(frozen=True, slots=True, kw_only=True)
class CUDAGraphOptions:
    debug_log_enable: bool = True
    gc_disable: bool = False  # skip gc and empty_cache; for all pieces but the first
    # return a weak view at capture too; right only for the last piece, whose output no later reads
    weak_ref_output: bool = True


@dataclass(slots=True, kw_only=True)
class CUDAGraphEntry:
    """What is kept for a descriptor; graph None means that the call launched nothing."""

    graph: Graph | None
    output: object  # weak views
    input_addresses: dict[str, int] = field(default_factory=dict)  # with SPECDEC_DEBUG=1

    @property
    def num_graphs(self) -> int:
        if isinstance(self.graph, BreakableCUDAGraphCapture):
            return self.graph.num_graphs
        return int(self.graph is not None)


class _GraphWrapper(ABC):
    """What both wrappers share; each says how a call is captured."""

    def __init__(
        self,
        runnable: Callable[..., object],
        mode: CUDAGraphMode,
        pool: GraphPool,
        options: CUDAGraphOptions,
    ) -> None:
        self.runnable = runnable
        self.entries: dict[BatchDescriptor, CUDAGraphEntry] = {}
        self._mode = mode
        self._pool = pool
        self._options = options
        self._debug = debug_enabled()

    def __call__(self, *args: object, **kwargs: object) -> object:
        context = context_in(self._mode)
        if context is None:
            return self.runnable(*args, **kwargs)
        entry = self.entries.get(context.graph_key())
        if entry is None:
            return self._capture(context, args, kwargs)
        if self._debug:
            check_addresses(entry.input_addresses, addresses(args, kwargs, context))
        if entry.graph is not None:
            self._replay(entry.graph)
        return entry.output

    def __getattr__(self, name: str) -> object:
        """An attribute of the wrapped callable."""
        runnable = self.__dict__.get("runnable")
        if runnable is None or not hasattr(runnable, name):
            wrapper = type(self).__name__
            raise AttributeError(f"neither {wrapper} nor what it wraps has an attribute {name!r}")
        return getattr(runnable, name)

    def unwrap(self) -> Callable[..., object]:
        return self.runnable

    def has_captured(self, descriptor: BatchDescriptor) -> bool:
        """Whether a call with this descriptor would replay."""
        return descriptor in self.entries

    def num_graphs(self, descriptor: BatchDescriptor) -> int:
        return self.entries[descriptor].num_graphs

    def clear_graphs(self) -> None:
        """Drop every graph; the next call of a descriptor captures again."""
        for entry in self.entries.values():
            if entry.graph is not None:
                entry.graph.reset()
        self.entries.clear()

    def _capture(
        self, context: ForwardContext, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        descriptor = context.graph_key()
        held = self._pool.num_bytes() if self._options.debug_log_enable else 0
        graph, output = self._capture_call(descriptor, partial(self.runnable, *args, **kwargs))
        weak = self._pool.weaken(output)
        entry = CUDAGraphEntry(graph=graph, output=weak)
        if self._debug:
            entry.input_addresses = addresses(args, kwargs, context)
        self.entries[descriptor] = entry
        if self._options.debug_log_enable:
            taken = self._pool.num_bytes() - held
            log_capture(repr(self.runnable), self._mode, descriptor, entry.num_graphs, taken)
        # a strong output keeps its memory from the pieces captured after this one
        return weak if self._options.weak_ref_output else output

    @abstractmethod
    def _capture_call(self, descriptor: BatchDescriptor, call: Callable[[], object]) -> Captured:
        """What replays `call`, None if there is nothing to launch; and what it returned."""

    def _replay(self, graph: Graph) -> None:
        graph.replay()


class CUDAGraphWrapper(_GraphWrapper):
    """Captures `runnable` whole, when the runtime mode is the one that it was made for."""

    def __init__(
        self,
        runnable: Callable[..., object],
        runtime_mode: CUDAGraphMode,
        pool: GraphPool,
        options: CUDAGraphOptions | None = None,
    ) -> None:
        if runtime_mode not in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            raise ValueError(f"runtime_mode={runtime_mode}: a wrapper is for FULL or for PIECEWISE")
        self.runtime_mode = runtime_mode
        self.options = options or CUDAGraphOptions()
        super().__init__(runnable, runtime_mode, pool, self.options)

    def _capture_call(self, descriptor: BatchDescriptor, call: Callable[[], object]) -> Captured:
        collect = not self.options.gc_disable
        is_last = self.options.weak_ref_output
        return capture_graph(self._pool, descriptor, call, collect=collect, is_last=is_last)

    def _replay(self, graph: Graph) -> None:
        self._pool.hooks.synchronize()
        graph.replay()


class BreakableCUDAGraphWrapper(_GraphWrapper):
    """Captures `runnable` in segments around its eager breaks, in the runtime mode PIECEWISE."""

    def __init__(
        self, runnable: Callable[..., object], pool: GraphPool, *, debug_log_enable: bool = True
    ) -> None:
        options = CUDAGraphOptions(debug_log_enable=debug_log_enable)
        super().__init__(runnable, CUDAGraphMode.PIECEWISE, pool, options)

    def _capture_call(self, descriptor: BatchDescriptor, call: Callable[[], object]) -> Captured:
        with BreakableCUDAGraphCapture(self._pool, owner=descriptor) as capture:
            output = call()
        return capture, output


def capture_graph(
    pool: GraphPool,
    owner: Hashable,
    forward: Callable[[], object],
    *,
    collect: bool = True,
    is_last: bool = True,
) -> Captured:
    """Capture one call as one graph; returns it with what the call returned, still strong."""
    with (
        exclusive_capture(f"the graph of {owner}", pool),
        pool.session(owner, collect=collect, is_last=is_last) as session,
    ):
        pool.hooks.synchronize()
        session.begin()
        output = forward()
        pool.hooks.join()
        graph = session.end()
    return graph, output
