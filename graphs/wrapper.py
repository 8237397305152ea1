"""One callable, one graph for each batch descriptor that it is called with.

Both wrappers trust mode and descriptor of the forward context: a mode that is not theirs runs the callable directly,
which makes nesting legal; a new descriptor captures; a known one replays and returns the stored output. They own no
buffers, copy no inputs and do no warm-up: the caller does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from graphs.addresses import addresses, check_addresses, debug_enabled
from graphs.breakable import BreakableCUDAGraphCapture
from graphs.capturing import exclusive_capture
from graphs.context import ForwardContext, get_forward_context, has_forward_context
from graphs.log import log_capture
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.protocol import Graph, GraphPool


@dataclass(frozen=True, slots=True, kw_only=True)
class CUDAGraphOptions:
    """debug_log_enable: log each capture. gc_disable: skip gc and empty_cache, for all pieces but the first.

    weak_ref_output: return a weak view at capture too; right only for the last piece, whose output no later one reads.
    """

    debug_log_enable: bool = True
    gc_disable: bool = False
    weak_ref_output: bool = True


@dataclass(slots=True, kw_only=True)
class CUDAGraphEntry:
    """What is kept for a descriptor."""

    batch_descriptor: BatchDescriptor
    graph: (
        Graph | BreakableCUDAGraphCapture | None
    )  # None: nothing was captured, nothing needs a launch
    output: object  # weak views
    input_addresses: dict[str, int] = field(default_factory=dict)  # with SPECDEC_DEBUG=1


class CUDAGraphWrapper:
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
        self.runnable, self.runtime_mode, self._pool = runnable, runtime_mode, pool
        self.options = options or CUDAGraphOptions()
        self.entries: dict[BatchDescriptor, CUDAGraphEntry] = {}
        self._debug = debug_enabled()

    def __call__(self, *args: object, **kwargs: object) -> object:
        context = captured_context(self.runtime_mode)
        if context is None:
            return self.runnable(*args, **kwargs)
        entry = self.entries.get(descriptor_of(context))
        if entry is None:
            return self._capture(context, args, kwargs)
        if self._debug:
            check_addresses(entry.input_addresses, addresses(args, kwargs, context))
        if entry.graph is not None:
            self._pool.hooks.synchronize()
            entry.graph.replay()
        return entry.output

    def __getattr__(self, name: str) -> object:
        return fall_through(self, name)

    def unwrap(self) -> Callable[..., object]:
        """The callable itself."""
        return self.runnable

    def clear_graphs(self) -> None:
        """Drop every graph; the next call of a descriptor captures again."""
        clear_entries(self.entries)

    def _capture(
        self, context: ForwardContext, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        descriptor, options, held = descriptor_of(context), self.options, self._pool.num_bytes()
        graph, output = capture_graph(
            self._pool,
            descriptor,
            lambda: self.runnable(*args, **kwargs),
            collect=not options.gc_disable,
            is_last=options.weak_ref_output,
        )
        entry = CUDAGraphEntry(
            batch_descriptor=descriptor, graph=graph, output=self._pool.weaken(output)
        )
        if self._debug:
            entry.input_addresses = addresses(args, kwargs, context)
        self.entries[descriptor] = entry
        if options.debug_log_enable:
            taken = self._pool.num_bytes() - held
            log_capture(
                repr(self.runnable), self.runtime_mode, descriptor, int(graph is not None), taken
            )
        # a strong output keeps its memory from the pieces captured after this one
        return entry.output if options.weak_ref_output else output


class BreakableCUDAGraphWrapper:
    """Captures `runnable` in segments around its eager breaks, when the runtime mode is PIECEWISE.

    debug_log_enable: a debug line for each capture
    """

    def __init__(
        self, runnable: Callable[..., object], pool: GraphPool, *, debug_log_enable: bool = True
    ) -> None:
        self.runnable, self._pool, self._is_logged = runnable, pool, debug_log_enable
        self.entries: dict[BatchDescriptor, CUDAGraphEntry] = {}
        self._debug = debug_enabled()

    def __call__(self, *args: object, **kwargs: object) -> object:
        context = captured_context(CUDAGraphMode.PIECEWISE)
        if context is None:
            return self.runnable(*args, **kwargs)
        entry = self.entries.get(descriptor_of(context))
        if entry is None:
            return self._capture(context, args, kwargs)
        if self._debug:
            check_addresses(entry.input_addresses, addresses(args, kwargs, context))
        assert entry.graph is not None
        entry.graph.replay()
        return entry.output

    def __getattr__(self, name: str) -> object:
        return fall_through(self, name)

    def unwrap(self) -> Callable[..., object]:
        """The callable itself."""
        return self.runnable

    def clear_graphs(self) -> None:
        """Drop every graph; the next call of a descriptor captures again."""
        clear_entries(self.entries)

    def has_captured(self, descriptor: BatchDescriptor) -> bool:
        """Whether a call with this descriptor would replay."""
        return descriptor in self.entries

    def num_graphs(self, descriptor: BatchDescriptor) -> int:
        """Graphs captured for a descriptor."""
        capture = self.entries[descriptor].graph
        return capture.num_graphs if isinstance(capture, BreakableCUDAGraphCapture) else 0

    def _capture(
        self, context: ForwardContext, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        descriptor, held = descriptor_of(context), self._pool.num_bytes()
        with BreakableCUDAGraphCapture(self._pool, owner=descriptor) as capture:
            output = self.runnable(*args, **kwargs)
        entry = CUDAGraphEntry(
            batch_descriptor=descriptor, graph=capture, output=self._pool.weaken(output)
        )
        if self._debug:
            entry.input_addresses = addresses(args, kwargs, context)
        self.entries[descriptor] = entry
        if self._is_logged:
            taken = self._pool.num_bytes() - held
            log_capture(
                repr(self.runnable), CUDAGraphMode.PIECEWISE, descriptor, capture.num_graphs, taken
            )
        return entry.output


def capture_graph(
    pool: GraphPool,
    owner: BatchDescriptor,
    forward: Callable[[], object],
    *,
    collect: bool = True,
    is_last: bool = True,
) -> tuple[Graph | None, object]:
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


def captured_context(mode: CUDAGraphMode) -> ForwardContext | None:
    """The forward context, if it asks for `mode`."""
    context = get_forward_context() if has_forward_context() else None
    return context if context is not None and context.runtime_mode is mode else None


def descriptor_of(context: ForwardContext) -> BatchDescriptor:
    """The key of the graph; a context with a mode must have one."""
    if context.batch_descriptor is None:
        raise ValueError(
            f"runtime_mode={context.runtime_mode} needs a batch_descriptor in the forward context"
        )
    return context.batch_descriptor


def fall_through(wrapper: CUDAGraphWrapper | BreakableCUDAGraphWrapper, name: str) -> object:
    """An attribute of the wrapped callable."""
    runnable = wrapper.__dict__.get("runnable")
    if runnable is None or not hasattr(runnable, name):
        raise AttributeError(
            f"neither {type(wrapper).__name__} nor what it wraps has an attribute {name!r}"
        )
    attribute: object = getattr(runnable, name)
    return attribute


def clear_entries(entries: dict[BatchDescriptor, CUDAGraphEntry]) -> None:
    """Reset the graphs of `entries` and forget them."""
    for entry in entries.values():
        if entry.graph is not None:
            entry.graph.reset()
    entries.clear()
