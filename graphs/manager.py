"""CudaGraphManager: the graphs of one family of forwards, from the choice of sizes to replay.

It captures all sizes at start, large before small, says for each batch which graph serves it, and
replays. A FULL graph serves uniform batches (each request has the same number of rows) and is keyed
by the number of requests, or ragged ones, by requests and tokens; a PIECEWISE one serves any batch
and is keyed by the number of tokens. A family may have FULL graphs of several kinds, whose forwards
differ (`sizes.further`); all share its pool.
Each manager has its own pool, sizes, counters and off switch.
"""

import gc
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from torch import Tensor
from tqdm import tqdm

from graphs.capturing import set_cudagraph_capturing_enabled, validate_cudagraph_capturing_enabled
from graphs.compiled import CompiledPieces
from graphs.counters import BatchKind, CaptureRecord, GraphCounters, log_capture
from graphs.dispatch import Dispatch, Dispatcher, agreed_batch, group_of
from graphs.frozen_heap import frozen_heap
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.piecewise import PiecewiseRunner
from graphs.protocol import CaptureError, Graph, GraphBackend, GraphHooks, GraphPool
from graphs.sizes import CaptureSizes
from graphs.wrapper import BreakableCUDAGraphWrapper, capture_graph

R = TypeVar("R")


class MakeForward(Protocol):
    """Prepares static inputs for a descriptor, outside any graph; returns the call to capture."""

    def __call__(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], object]:
        """The call sets its own forward context, with mode NONE to warm up, else FULL where `desc`
        has num_reqs and PIECEWISE where not. A warm-up launches the kernels of the capture.
        """


class CudaGraphManager:
    """The graphs of one family.

    name:      of the family, for progress bars and errors
    sizes:     what is captured; see `capture_sizes`
    mode:      not FULL, which would capture ragged batches whole
    query_len: rows of each request in a uniform batch
    backend:   None runs everything eagerly
    outputs:   static buffers [tokens, ...] that FULL graphs write and `run_fullgraph` slices
    use_breakable_cg: how PIECEWISE graphs are made; becomes False in a mode without them
    specialize_lora:  capture every size with and without LoRA adapters (`desc.has_lora`)
    hooks:     called around captures and replays; see GraphHooks
    """

    def __init__(
        self,
        name: str,
        sizes: CaptureSizes,
        mode: CUDAGraphMode,
        query_len: int,
        backend: GraphBackend | None,
        *,
        outputs: tuple[Tensor, ...] = (),
        use_breakable_cg: bool = True,
        specialize_lora: bool = False,
        hooks: GraphHooks | None = None,
    ) -> None:
        if mode.mixed_mode() is CUDAGraphMode.FULL:
            raise ValueError(
                f"{name}: mode={mode.name} asks for full graphs of ragged batches of any kind: "
                "give FULL_DECODE_ONLY or FULL_AND_PIECEWISE, and the batches in sizes.further"
            )
        self.name = name
        self.sizes = sizes
        self.mode = CUDAGraphMode.NONE if backend is None else mode
        self.use_breakable_cg = use_breakable_cg and self.mode.has_piecewise_cudagraphs()
        self.counters = GraphCounters()
        self._backend = backend
        self._outputs = outputs
        self._pool: GraphPool | None = None if backend is None else backend.new_pool()
        if self._pool is not None and hooks is not None:
            self._pool.hooks = hooks
        self._lora_cases = (True, False) if specialize_lora else (False,)
        self._piecewise = PiecewiseRunner(name)
        self._full: dict[BatchDescriptor, tuple[Graph | None, tuple[Tensor, ...]]] = {}
        self._query_len = query_len
        self._dispatcher = Dispatcher()

    def needs_capture(self) -> bool:
        return any(not self._is_captured(desc) for _, desc in self.descriptors())

    def descriptors(self) -> list[tuple[CUDAGraphMode, BatchDescriptor]]:
        """What is captured, in order: PIECEWISE before FULL, large before small."""
        tokens = self.sizes.tokens if self.mode.has_piecewise_cudagraphs() else ()
        is_full = self.mode.decode_mode() is CUDAGraphMode.FULL
        requests, further = (self.sizes.requests, self.sizes.further) if is_full else ((), ())
        Q, cases = self._query_len, self._lora_cases
        pieces = [BatchDescriptor(n, has_lora=lora) for n in reversed(tokens) for lora in cases]
        full = [BatchDescriptor(n * Q, n, Q, lora) for n in reversed(requests) for lora in cases]
        full += [replace(desc, has_lora=lora) for desc in reversed(further) for lora in cases]
        modes = [CUDAGraphMode.PIECEWISE] * len(pieces) + [CUDAGraphMode.FULL] * len(full)
        return list(zip(modes, pieces + full, strict=True))

    def init_breakable_cg_runner(self, model: Callable[..., object]) -> None:
        """Build what `run_pw_graph` runs, before `capture`; another model later is an error."""
        if self._pool is None or not self.mode.has_piecewise_cudagraphs():
            return
        if not self.use_breakable_cg:
            needed = "init_compiled_runner(model, split_ops)"
            raise ValueError(f"{self.name}: use_breakable_cg=False takes {needed}")
        # the manager logs
        self._piecewise.use(BreakableCUDAGraphWrapper(model, self._pool, debug_log_enable=False))

    def init_compiled_runner(self, model: Callable[..., object], split_ops: Sequence[str]) -> None:
        """Build compiled pieces of `model`, split at the ops of these names, for the same use."""
        if self._pool is None or not self.mode.has_piecewise_cudagraphs():
            return
        if self.use_breakable_cg:
            needed = "init_breakable_cg_runner(model)"
            raise ValueError(f"{self.name}: use_breakable_cg=True takes {needed}")
        self._piecewise.use(CompiledPieces(model, self._pool, split_ops))

    def capture(self, make_forward: MakeForward, largest_only: bool = False) -> None:
        """Warm up and capture every size, or the largest of each mode and kind."""
        if self._backend is None or self._pool is None or not self.needs_capture():
            return
        validate_cudagraph_capturing_enabled(f"the {self.name} family", self._pool)
        with self._backend.side_stream(), frozen_heap(now=False):
            for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
                wanted = [desc for its_mode, desc in self.descriptors() if its_mode is mode]
                if largest_only:
                    wanted = list({group_of(desc): desc for desc in reversed(wanted)}.values())
                todo = [desc for desc in wanted if not self._is_captured(desc)]
                self._capture_mode(mode, todo, make_forward)
        self._update_dispatcher()

    def set_cudagraph_capturing_enabled(self, enabled: bool) -> None:
        if self._pool is not None:
            set_cudagraph_capturing_enabled(self._pool, enabled)

    def measure(self, make_forward: MakeForward) -> int:
        """Bytes of the largest capture of each mode and kind, about what all take; keeps none."""
        self.capture(make_forward, largest_only=True)
        num_bytes = self.counters.num_bytes
        self.clear_graphs()
        return num_bytes

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        query_len: int | None,
        *,
        has_lora: bool = False,
        kind: Hashable = None,
        agreed: BatchDescriptor | None = None,
        most_reqs: int | None = None,
    ) -> Dispatch:
        """The graph of a batch and its padded sizes; NONE and the true sizes if there is none.

        query_len: rows of each request, None where they differ
        has_lora:  some request has an adapter; only with `specialize_lora`
        kind:      of the FULL graphs that may serve it; PIECEWISE ones serve all
        agreed:    the `agreed_batch` of several ranks, which all dispatch in place of their own
        most_reqs: of a FULL graph, where static inputs have room for no more; None: any number
        """
        own = BatchDescriptor(num_tokens, num_reqs, query_len, has_lora, kind)
        batch = own if agreed is None else agreed
        if agreed is not None and agreed_batch([agreed, own]) != agreed:
            problem = f"the agreed batch {agreed} does not hold this rank's own, {own}"
            raise ValueError(f"{self.name}: {problem}")
        if batch.has_lora not in self._lora_cases:
            needed = "has_lora=True needs specialize_lora=True"
            raise ValueError(f"{self.name} has no graphs with LoRA: {needed}")
        chosen = self._dispatcher.dispatch(batch, most_reqs)
        self.counters.batches[BatchKind(chosen.mode, num_tokens, chosen.descriptor.num_tokens)] += 1
        return chosen

    def run_fullgraph(self, desc: BatchDescriptor) -> tuple[Tensor, ...]:
        """Replay a FULL graph; returns the first num_tokens rows of each output buffer."""
        if desc not in self._full:
            raise CaptureError(f"{self.name} has no full graph of {desc}: ask dispatch which exist")
        graph, outputs = self._full[desc]
        if graph is not None and self._pool is not None:
            self._pool.hooks.synchronize()
            graph.replay()
        self.counters.replays[CUDAGraphMode.FULL] += 1
        return outputs

    def run_pw_graph(self, model: Callable[..., R], model_inputs: Mapping[str, object]) -> R:
        """Run `model` as the forward context says: eagerly, or in captured pieces."""
        replays = self._piecewise.will_replay()
        result = self._piecewise.run(model, model_inputs)
        if replays:
            self.counters.replays[CUDAGraphMode.PIECEWISE] += 1
        return result

    def num_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.num_bytes()

    def clear_graphs(self) -> None:
        """Drop every graph and give the memory back; `capture` may be called again."""
        for graph, _ in self._full.values():
            if graph is not None:
                graph.reset()
        self._full.clear()
        self._piecewise.clear_graphs()
        self.counters.captures.clear()
        self._update_dispatcher()
        if self._backend is not None and self._pool is not None:
            self._pool.close()
            self._backend.release()

    def _capture_mode(
        self, mode: CUDAGraphMode, todo: Sequence[BatchDescriptor], make_forward: MakeForward
    ) -> None:
        backend = self._backend
        assert backend is not None
        is_hidden = None if todo else True  # None: shown on terminals only
        bar = tqdm(todo, desc=f"{self.name} {mode.name}", unit="size", disable=is_hidden)
        for desc in bar:
            began = time.perf_counter()
            self._warm_up(desc, make_forward)
            forward = make_forward(desc, warmup=False)
            backend.release()
            gc.freeze()  # spares the next collection what survived this one
            held = self.num_bytes()
            num_graphs = self._capture_forward(desc, forward)
            backend.release(collect=False)
            seconds = time.perf_counter() - began
            taken = self.num_bytes() - held
            record = CaptureRecord(
                mode=mode, descriptor=desc, num_graphs=num_graphs, seconds=seconds, num_bytes=taken
            )
            self.counters.captures.append(record)
            log_capture(self.name, mode, desc, num_graphs, taken)
            bar.set_postfix_str(f"{backend.free_memory() / 2**30:.2f} GiB free")

    def _warm_up(self, desc: BatchDescriptor, make_forward: MakeForward) -> None:
        make_forward(desc, warmup=True)()
        if self._is_captured(desc):
            self._piecewise.clear_graphs()
            raise CaptureError(
                f"{self.name}: the warm-up of {desc} was captured: "
                "with warmup=True its forward context has mode NONE"
            )

    def _capture_forward(self, desc: BatchDescriptor, forward: Callable[[], object]) -> int:
        """Capture one size; returns how many graphs it took."""
        if desc.num_reqs:
            assert self._pool is not None
            owner = self.name, desc  # others may share the memory
            graph, _ = capture_graph(self._pool, owner, forward, collect=False)
            self._full[desc] = graph, tuple(output[: desc.num_tokens] for output in self._outputs)
            return int(graph is not None)
        forward()
        if not self._piecewise.has_captured(desc):
            raise CaptureError(
                f"{self.name}: the forward of {desc} captured nothing: it must set a forward "
                "context with mode PIECEWISE and this descriptor, and call run_pw_graph, whose "
                "runner was initialised before"
            )
        return self._piecewise.num_graphs(desc)

    def _is_captured(self, desc: BatchDescriptor) -> bool:
        return desc in self._full if desc.num_reqs else self._piecewise.has_captured(desc)

    def _update_dispatcher(self) -> None:
        captured = (desc for _, desc in self.descriptors() if self._is_captured(desc))
        self._dispatcher.set_captured(captured)
