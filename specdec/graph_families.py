"""The graph families of an engine: one CudaGraphManager for each kind of forward, with its own pool and sizes.

target_prefill  PIECEWISE  prompt chunks
target_decode   FULL       rounds: K + 1 rows per request
draft_prefill   both       behind a chunk in pieces, behind a round whole
draft_decode    FULL       K - 1 rows per request, one after another
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from graphs.capturing import set_cudagraph_capturing_enabled
from graphs.counters import GraphCounters
from graphs.manager import CudaGraphManager, MakeForward
from graphs.protocol import GraphBackend
from graphs.sizes import capture_sizes
from specdec.config import GraphConfig
from specdec.step import Passes


class GraphFamilies:
    """backend: None runs every family eagerly."""

    def __init__(
        self,
        config: GraphConfig,
        backend: GraphBackend | None,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        query_len: int,
        has_draft: bool,
    ) -> None:
        self.query_len = query_len

        def family(name: str, query_len: int, max_tokens: int) -> CudaGraphManager:
            sizes = capture_sizes(max_num_seqs, max_tokens, config.request_sizes, config.token_sizes)
            is_breakable = not config.compile_piecewise
            return CudaGraphManager(name, sizes, config.modes[name], query_len, backend, use_breakable_cg=is_breakable)

        self.target_prefill = family("target_prefill", query_len, max_num_batched_tokens)
        self.target_decode = family("target_decode", query_len, max_num_batched_tokens)
        self.by_name = {"target_prefill": self.target_prefill, "target_decode": self.target_decode}
        if has_draft:
            # rounds may run in pieces too
            self.by_name["draft_prefill"] = family(
                "draft_prefill", query_len, max(max_num_batched_tokens, query_len * max_num_seqs)
            )
            self.by_name["draft_decode"] = family("draft_decode", 1, max_num_batched_tokens)

    def dispatch_chunk(self, num_reqs: int, num_tokens: int, num_sampled: int) -> Passes:
        """The graphs of a prefill chunk; the draft proposes where a prompt ends."""
        target = self.target_prefill.dispatch(num_reqs, num_tokens, None)
        if "draft_prefill" not in self.by_name:
            return Passes(target=target)
        prefill = self.by_name["draft_prefill"].dispatch(num_reqs, num_tokens, None)
        decode = self.by_name["draft_decode"].dispatch(num_reqs, num_reqs, 1) if num_sampled else None
        return Passes(target=target, draft_prefill=prefill, draft_decode=decode)

    def dispatch_round(self, num_reqs: int) -> Passes:
        """The graphs of a round."""
        num_tokens = num_reqs * self.query_len
        target = self.target_decode.dispatch(num_reqs, num_tokens, self.query_len)
        if "draft_prefill" not in self.by_name:
            return Passes(target=target)
        prefill = self.by_name["draft_prefill"].dispatch(num_reqs, num_tokens, self.query_len)
        decode = self.by_name["draft_decode"].dispatch(num_reqs, num_reqs, 1)
        return Passes(target=target, draft_prefill=prefill, draft_decode=decode)

    def capture(self, makers: Mapping[str, MakeForward]) -> None:
        """Capture every size of every family; afterwards nothing is captured until this is called again."""
        if not self._needs_capture():
            return
        with _capturing_allowed():
            for name, manager in self.by_name.items():
                manager.capture(makers[name])

    def measure(self, makers: Mapping[str, MakeForward]) -> dict[str, int]:
        """Bytes that each family's pool will take, by its largest graphs; none is kept."""
        if not self._needs_capture():
            return dict.fromkeys(self.by_name, 0)
        with _capturing_allowed():
            return {name: manager.measure(makers[name]) for name, manager in self.by_name.items()}

    def counters(self) -> dict[str, GraphCounters]:
        """What each family captured and ran."""
        return {name: manager.counters for name, manager in self.by_name.items()}

    def clear(self) -> None:
        """Drop every graph and give the memory back; from here on everything runs eagerly."""
        for manager in self.by_name.values():
            manager.clear_graphs()

    def _needs_capture(self) -> bool:
        return any(manager.needs_capture() for manager in self.by_name.values())


def init_piecewise(manager: CudaGraphManager, model: Callable[..., object]) -> None:
    """Prepare `model` for run_pw_graph, in the implementation that the manager was made for."""
    if manager.use_breakable_cg:
        manager.init_breakable_cg_runner(model)
    else:
        manager.init_compiled_runner(model, ["specdec::attend"])


@contextmanager
def _capturing_allowed() -> Iterator[None]:
    """Captures happen in the body and nowhere else in this process, so never between two requests."""
    set_cudagraph_capturing_enabled(True)
    try:
        yield
    finally:
        set_cudagraph_capturing_enabled(False)
