"""The graph families of an engine: one CudaGraphManager for each kind of forward, with its own pool and sizes.

target_prefill  PIECEWISE  prompt chunks
target_decode   FULL       rounds: K + 1 rows per request
draft_prefill   both       behind a chunk in pieces, behind a round whole
draft_decode    FULL       K - 1 rows per request, one after another
target_plain    FULL       rounds of a drafting engine in which nobody drafts: one row per request

The target's end at the hidden states; its tokens are chosen behind them. The draft chooses inside its own, so rounds
with a request that is not greedy have others (`_sampled`), which draw with noise.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from graphs.counters import GraphCounters
from graphs.manager import CudaGraphManager, MakeForward
from graphs.modes import CUDAGraphMode
from graphs.protocol import GraphBackend
from graphs.sizes import capture_sizes
from specdec.config import GraphConfig
from specdec.requests.needs import GREEDY, Needs
from specdec.stepping.step_sizes import Passes, Step

SAMPLED = "_sampled"


# Rows of the largest chunk that is captured by default. A larger one computes for 27 ms and more on an 8B target, so
# that launching it op by op costs no time, while its graphs would take memory in each of two families.
LARGEST_CHUNK = 1024
# Request counts of target_plain: up to 64 rows a forward takes as long as its weights are read, so few sizes serve.
PLAIN_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPair:
    """The draft's two families."""

    prefill: CudaGraphManager
    decode: CudaGraphManager


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftGraphs(DraftPair):
    """Those of greedy steps, whose pieces serve all steps, and those of sampled ones."""

    sampled: DraftPair

    def of(self, step: Step) -> DraftPair:
        """The families whose full graphs a step runs."""
        return self.sampled if step.needs.noise else self


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
        self.by_name: dict[str, CudaGraphManager] = {}

        def family(name: str, query_len: int, max_tokens: int) -> CudaGraphManager:
            """A family, and its `_sampled` one if it is the draft's."""
            if config.token_sizes is None:
                max_tokens = min(max_tokens, max(LARGEST_CHUNK, query_len * max_num_seqs))
            sizes = capture_sizes(max_num_seqs, max_tokens, config.request_sizes, config.token_sizes)
            is_breakable, mode = not config.compile_piecewise, _mode_of(config, name)
            manager = CudaGraphManager(name, sizes, mode, query_len, backend, use_breakable_cg=is_breakable)
            self.by_name[name] = manager
            if name.startswith("draft"):
                has_full = mode.decode_mode() is CUDAGraphMode.FULL
                full = CUDAGraphMode.FULL_DECODE_ONLY if has_full else CUDAGraphMode.NONE
                self.by_name[name + SAMPLED] = CudaGraphManager(name + SAMPLED, sizes, full, query_len, backend)
            return manager

        self.target_prefill = family("target_prefill", query_len, max_num_batched_tokens)
        self.target_decode = family("target_decode", query_len, max_num_batched_tokens)
        self.draft: DraftGraphs | None = None
        self.target_plain: CudaGraphManager | None = None
        if has_draft:
            self.target_plain = self._plain(config, backend, max_num_seqs)
            # rounds may run in pieces too
            prefill = family("draft_prefill", query_len, max(max_num_batched_tokens, query_len * max_num_seqs))
            decode = family("draft_decode", 1, max_num_batched_tokens)
            sampled = DraftPair(
                prefill=self.by_name["draft_prefill" + SAMPLED], decode=self.by_name["draft_decode" + SAMPLED]
            )
            self.draft = DraftGraphs(prefill=prefill, decode=decode, sampled=sampled)

    def _plain(self, config: GraphConfig, backend: GraphBackend | None, max_num_seqs: int) -> CudaGraphManager:
        requests = config.request_sizes
        if requests is None:
            requests = (*(n for n in PLAIN_SIZES if n < max_num_seqs), *range(72, max_num_seqs, 8), max_num_seqs)
        sizes = capture_sizes(max_num_seqs, max_num_seqs, requests, ())
        manager = CudaGraphManager("target_plain", sizes, _mode_of(config, "target_decode"), 1, backend)
        self.by_name["target_plain"] = manager
        return manager

    def dispatch_chunk(self, num_reqs: int, num_tokens: int, num_sampled: int, needs: Needs = GREEDY) -> Passes:
        """The graphs of a prefill chunk; the draft proposes where a prompt ends."""
        target = self.target_prefill.dispatch(num_reqs, num_tokens, None)
        if self.draft is None:
            return Passes(target=target)
        prefill = self.draft.prefill.dispatch(num_reqs, num_tokens, None)
        draft = self.draft.sampled if needs.noise else self.draft
        decode = draft.decode.dispatch(num_reqs, num_reqs, 1) if num_sampled else None
        return Passes(target=target, draft_prefill=prefill, draft_decode=decode)

    def dispatch_round(self, num_reqs: int, needs: Needs = GREEDY, query_len: int | None = None) -> Passes:
        """The graphs of a round; query_len 1 is one in which nobody drafts."""
        if query_len == 1 and self.target_plain is not None:
            return Passes(target=self.target_plain.dispatch(num_reqs, num_reqs, 1))
        num_tokens = num_reqs * self.query_len
        target = self.target_decode.dispatch(num_reqs, num_tokens, self.query_len)
        if self.draft is None:
            return Passes(target=target)
        draft = self.draft.sampled if needs.noise else self.draft
        prefill = draft.prefill.dispatch(num_reqs, num_tokens, self.query_len)
        if needs.noise and prefill.mode is CUDAGraphMode.NONE:
            # the pieces of the greedy family end where a token is chosen
            prefill = self.draft.prefill.dispatch(num_reqs, num_tokens, None)
        decode = draft.decode.dispatch(num_reqs, num_reqs, 1)
        return Passes(target=target, draft_prefill=prefill, draft_decode=decode)

    def capture(self, makers: Mapping[str, MakeForward]) -> None:
        """Capture every size of every family; afterwards nothing is captured until this is called again."""
        if not self._needs_capture():
            return
        with self._capturing_allowed():
            for name, manager in self.by_name.items():
                manager.capture(makers[name])

    def measure(self, makers: Mapping[str, MakeForward]) -> dict[str, int]:
        """Bytes that each family's pool will take, by its largest graphs; none is kept."""
        if not self._needs_capture():
            return dict.fromkeys(self.by_name, 0)
        with self._capturing_allowed():
            return {name: manager.measure(makers[name]) for name, manager in self.by_name.items()}

    def counters(self) -> dict[str, GraphCounters]:
        """What each family captured and ran."""
        return {name: manager.counters for name, manager in self.by_name.items()}

    def clear_all_graphs(self) -> None:
        """Drop every graph of this engine and give the memory back; from here on everything runs eagerly."""
        for manager in self.by_name.values():
            manager.clear_graphs()

    def _needs_capture(self) -> bool:
        return any(manager.needs_capture() for manager in self.by_name.values())

    @contextmanager
    def _capturing_allowed(self) -> Iterator[None]:
        """Captures of these families happen in the body and nowhere else, so never between two requests."""
        self._allow_capturing(True)
        try:
            yield
        finally:
            self._allow_capturing(False)

    def _allow_capturing(self, is_allowed: bool) -> None:
        for manager in self.by_name.values():
            manager.set_cudagraph_capturing_enabled(is_allowed)


def _mode_of(config: GraphConfig, family: str) -> CUDAGraphMode:
    """The mode of a family's manager: "FULL" for one whose batches are all uniform is FULL_DECODE_ONLY there."""
    mode = config.modes[family]
    is_uniform = family in ("target_decode", "draft_decode")
    return CUDAGraphMode.FULL_DECODE_ONLY if is_uniform and mode is CUDAGraphMode.FULL else mode


def init_piecewise(manager: CudaGraphManager, model: Callable[..., object]) -> None:
    """Prepare `model` for run_pw_graph, in the implementation that the manager was made for."""
    if manager.use_breakable_cg:
        manager.init_breakable_cg_runner(model)
    else:
        manager.init_compiled_runner(model, ["specdec::attend"])
