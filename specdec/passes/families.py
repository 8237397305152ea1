"""The graph families of an engine: one CudaGraphManager per kind of forward, with its own pool.

    target.prefill  both       steps with prompts: short ones whole, others in pieces
    target.decode   FULL       rounds: the rows of each request, or rows that are shared out
    target.plain    FULL       rounds of an engine with a draft in which no request drafts
    target.choice   FULL       what is chosen after all rows of a round whose requests are greedy
    draft.prefill   both       with prompts in pieces, after a round whole or in pieces; where
                               nothing is drafted, a draft of one layer extends its KV op by op
    draft.decode    FULL       the further levels: of chains one row per request, else several
    draft.extend    FULL       the draft's KV after a plain round, where a later one may draft

Where rows are shared out (EngineSizes.is_adaptive), target.decode and draft.prefill have graphs by
requests and rows, and draft.decode is one level, replayed for each. captured.py says which sizes
there are. A draft that proposes blocks extends its KV in draft.prefill, after rounds alone, plain
ones among them, and proposes in draft.decode, with graphs of each length and of trees; it has no
other family.
P-EAGLE has its further levels in one pass, with graphs of each number of them.

The target's graphs end at the hidden states; its tokens are chosen after them, kernel by kernel
unless target.choice does it. The draft chooses inside its own, so those of each Proposal are a kind
of their own: greedy or drawn, of width 1 or above. In counters and logs the dot is an underscore;
cuda_graph_modes sets plain and choice with target_decode.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from graphs.counters import GraphCounters
from graphs.dispatch import Dispatch
from graphs.manager import CudaGraphManager, MakeForward
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.protocol import GraphBackend
from graphs.sizes import CaptureSizes, capture_sizes
from specdec.config import GraphConfig
from specdec.passes.captured import plain_sizes, request_sizes, shared_shapes, tree_sizes
from specdec.rounds.short import SHORT, SHORT_ROWS, is_short
from specdec.rounds.step_sizes import Passes, Proposal
from specdec.scheduling.work import Round
from specdec.sizes import IDLE, EngineSizes

Captures = Sequence[tuple[CudaGraphManager, MakeForward]]  # what is captured, and how it is made
ROWS_ALONE = Proposal(is_drawn=False, is_wide=False)  # of graphs after rounds that propose nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGraphs:
    """plain: None without a draft."""

    prefill: CudaGraphManager
    decode: CudaGraphManager
    plain: CudaGraphManager | None
    choice: CudaGraphManager

    def of_round(self, num_rows: int | None) -> CudaGraphManager:
        """Find the family of rounds with so many rows for each request; None: they differ."""
        return self.plain if num_rows == 1 and self.plain is not None else self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftGraphs:
    """extend: None where the number of drafts is fixed, and where prefill proposes nothing."""

    prefill: CudaGraphManager
    decode: CudaGraphManager
    extend: CudaGraphManager | None


class GraphFamilies:
    """backend: None runs every family eagerly. num_dear: up to here each row of a round costs."""

    def __init__(
        self,
        config: GraphConfig,
        backend: GraphBackend | None,
        sizes: EngineSizes,
        has_draft: bool,
        num_dear: int = 0,
    ) -> None:
        self._config = config
        self._backend = backend
        self._sizes = sizes
        self.managers: list[CudaGraphManager] = []  # in the order of capture
        # requests of rounds of trees, where others are of chains
        self.tree_sizes = tree_sizes(sizes, config.request_sizes)
        self._drafts_blocks = has_draft and not sizes.has_seeds
        # of rounds whose rows are shared out: (requests, rows), by rows
        self.shapes = shared_shapes(sizes, config.request_sizes, num_dear)
        self.target = self._target(has_draft)
        self.draft = self._draft() if has_draft else None

    def passes(
        self, round: Round, max_seq_len: int, is_drawn: bool, is_greedy: bool = False
    ) -> Passes:
        """Choose the graphs of a step.

        max_seq_len: see Step. is_drawn: the draft draws with noise. is_greedy: no token is chosen
        by written logits
        """
        target = self._verifying(round, max_seq_len)
        choice = None
        if is_greedy and target.mode is CUDAGraphMode.FULL and not round.parts:
            rows = target.descriptor.num_tokens
            choice = self.target.choice.dispatch(rows, rows, 1)
        return replace(self._with_draft(round, target, is_drawn), choice=choice)

    def _with_draft(self, round: Round, target: Dispatch, is_drawn: bool) -> Passes:
        B, V = round.num_reqs, round.num_verified
        if self.draft is None or round.next_shape == IDLE:
            return Passes(target=target)
        is_plain = not round.parts and not round.next_shape.nodes and round.num_verify_rows == V
        if is_plain and not self._drafts_blocks:
            assert self.draft.extend is not None, "the number of drafts is fixed"
            extend = self.draft.extend.dispatch(B, B, 1)
            return Passes(target=target, draft_prefill=extend, extends_only=True)
        has_block = self._sizes.block_rows > 0 and not round.next_shape.is_wide
        block = round.next_shape.levels if has_block else 0
        proposal = Proposal(is_drawn, round.next_shape.is_wide, block)
        prefill = self._extending(round, proposal)
        if not round.proposes:
            # the graphs of rounds propose, wanted or not
            is_only = len(round.parts) > 0
            return Passes(target=target, draft_prefill=prefill, extends_only=is_only)
        decode = None
        if not block or self._sizes.rows_of_block(block) > 0:
            decode = self.draft.decode.dispatch(B, B, 1, kind=proposal)
        return Passes(target=target, draft_prefill=prefill, draft_decode=decode)

    def _verifying(self, round: Round, max_seq_len: int) -> Dispatch:
        B, T, N = round.num_reqs, round.num_tokens, round.shape.rows
        if round.parts:
            kind = SHORT if is_short(round, max_seq_len) else None
            return self.target.prefill.dispatch(B, T, None, kind=kind)
        num_rows = None if round.shared_rows else N
        return self.target.of_round(num_rows).dispatch(B, T, num_rows)

    def _extending(self, round: Round, proposal: Proposal) -> Dispatch:
        """Choose the draft's prefill, which sees the rows of paths."""
        assert self.draft is not None, "nothing drafts"
        prefill, V, P = self.draft.prefill, round.num_verified, round.shape.path_len
        num_rows = round.shared_rows or V * P
        if round.parts:
            return prefill.dispatch(round.num_reqs, num_rows + round.num_prompt_rows, None)
        is_ragged = round.shared_rows > 0 or (self._drafts_blocks and self._sizes.is_adaptive)
        most_reqs = self._sizes.max_tree_requests if round.shape.is_wide else None
        if round.shape.is_wide and self.tree_sizes:  # beside rounds whose rows are shared out
            is_ragged = True
            if prefill.mode.decode_mode() is CUDAGraphMode.FULL:
                # padding has paths too, and there is a graph of just their rows
                num_rows = next(n for n in self.tree_sizes if n >= V) * P
        num_each = None if is_ragged else P
        kind = ROWS_ALONE if self._drafts_blocks else proposal._replace(block=0)
        return prefill.dispatch(V, num_rows, num_each, kind=kind, most_reqs=most_reqs)

    def capture(self, captures: Captures) -> None:
        """Capture every size of every family; then nothing more until the next call."""
        if any(manager.needs_capture() for manager in self.managers):
            with self._capturing_allowed():
                for manager, make_forward in captures:
                    manager.capture(make_forward)

    def measure(self, captures: Captures) -> dict[str, int]:
        """Count the bytes that each family's pool will take, by its largest graphs; keep none."""
        if not any(manager.needs_capture() for manager in self.managers):
            return {manager.name: 0 for manager in self.managers}
        with self._capturing_allowed():
            return {manager.name: manager.measure(make) for manager, make in captures}

    def counters(self) -> dict[str, GraphCounters]:
        return {manager.name: manager.counters for manager in self.managers}

    def clear_all_graphs(self) -> None:
        """Drop every graph of this engine and give the memory back; from here on all is eager."""
        for manager in self.managers:
            manager.clear_graphs()

    def _target(self, has_draft: bool) -> TargetGraphs:
        sizes, config = self._sizes, self._config
        Q = sizes.query_len
        rounds = self._rounds(Q)
        if sizes.is_adaptive:
            shared = [BatchDescriptor(rows, n) for n, rows in self.shapes]
            shapes = [(n, sizes.shape_of(n, is_wide=True).rows) for n in self.tree_sizes]
            wide = [BatchDescriptor(n * N, n, N) for n, N in shapes]
            rounds = CaptureSizes(requests=(), tokens=(), further=(*shared, *wide))
        tokens = self._rounds(Q).tokens
        short = tuple(
            BatchDescriptor(n, min(n, sizes.max_num_seqs), kind=SHORT)
            for n in tokens
            if n <= SHORT_ROWS
        )
        of_prompts = CaptureSizes(requests=(), tokens=tokens, further=short)
        mode = config.modes["target_prefill"]
        prefill = self._manager("target_prefill", of_prompts, mode, Q)
        mode = _mode_of(config, "target_decode")
        decode = self._manager("target_decode", rounds, mode, Q)
        plain = self._plain() if has_draft else None
        captured = [*decode.descriptors(), *(() if plain is None else plain.descriptors())]
        num_rows = tuple(sorted({desc.num_tokens for _, desc in captured}))
        of_rows = CaptureSizes(requests=num_rows, tokens=())
        choice = self._manager("target_choice", of_rows, mode, 1)
        return TargetGraphs(prefill=prefill, decode=decode, plain=plain, choice=choice)

    def _rounds(self, query_len: int) -> CaptureSizes:
        """Choose numbers of requests with equally many rows each, and rows of steps in pieces."""
        config, sizes = self._config, self._sizes
        most, max_tokens = sizes.max_num_seqs, sizes.max_num_rows
        if config.token_sizes is None:
            max_tokens = min(max_tokens, max(config.max_tokens, sizes.max_verify_rows))
        requests = config.request_sizes or request_sizes(most, query_len)
        requests = [*requests, *self.tree_sizes]  # no graph is wider than a step of trees may be
        return capture_sizes(most, max_tokens, requests, config.token_sizes)

    def _plain(self) -> CudaGraphManager:
        requests = self._config.request_sizes
        most = self._sizes.max_num_seqs
        sizes = capture_sizes(most, most, plain_sizes(most) if requests is None else requests, ())
        return self._manager("target_plain", sizes, _mode_of(self._config, "target_decode"), 1)

    def _draft(self) -> DraftGraphs:
        config = self._config
        if self._drafts_blocks:
            return self._draft_of_blocks()
        tokens = self._rounds(self._sizes.path_len).tokens
        prefill = self._drafting("draft_prefill", config.modes["draft_prefill"], tokens)
        decode = self._drafting("draft_decode", _mode_of(config, "draft_decode"), ())
        extend = None
        if self._sizes.is_adaptive:
            plain = self.target.of_round(1).sizes
            extend = self._manager("draft_extend", plain, _full_or_none(prefill.mode), 1)
        return DraftGraphs(prefill=prefill, decode=decode, extend=extend)

    def _draft_of_blocks(self) -> DraftGraphs:
        mode = _full_or_none(self._config.modes["draft_prefill"])
        further = tuple(replace(each, kind=ROWS_ALONE) for each in self._prefills(ROWS_ALONE))
        extended = CaptureSizes(requests=(), tokens=(), further=further)
        prefill = self._manager("draft_prefill", extended, mode, self._sizes.path_len)
        decode = self._drafting("draft_decode", _mode_of(self._config, "draft_decode"), ())
        return DraftGraphs(prefill=prefill, decode=decode, extend=None)

    def _drafting(self, name: str, mode: CUDAGraphMode, tokens: Sequence[int]) -> CudaGraphManager:
        """Make a family of the draft, with the graphs of each proposal. tokens: of its pieces."""
        widths = (False, True) if self.tree_sizes else (self._sizes.shape_of(1).is_wide,)
        is_prefill = name == "draft_prefill"
        blocks = (0,) if is_prefill else self._sizes.block_lengths or (0,)
        kinds = [(is_wide, block) for is_wide in widths for block in ((0,) if is_wide else blocks)]
        proposals = [Proposal(is_drawn, *kind) for is_drawn in (False, True) for kind in kinds]
        batches = self._prefills if is_prefill else self._levels
        further = tuple(replace(each, kind=how) for how in proposals for each in batches(how))
        sizes = CaptureSizes(requests=(), tokens=tuple(tokens), further=further)
        return self._manager(name, sizes, mode, self._sizes.path_len)

    def _prefills(self, proposal: Proposal) -> Iterable[BatchDescriptor]:
        """List the draft's prefills after rounds, small before large."""
        sizes, P = self._sizes, self._sizes.path_len
        if not sizes.is_adaptive:
            return [BatchDescriptor(n * P, n, P) for n in self._rounds(P).requests]
        found = {*self.shapes}
        if proposal.is_wide:  # after few rows of chains, these are padded
            own = ((n, sizes.shape_of(n, is_wide=True).path_len) for n in self.tree_sizes)
            found = {(n, n * Q) for n, path_len in own for Q in (path_len, P)}
        elif self._drafts_blocks:  # after rounds of any kind
            found |= {(n, n) for n in self.target.of_round(1).sizes.requests}
            found |= {(n, n * sizes.shape_of(n, is_wide=True).path_len) for n in self.tree_sizes}
        shapes = sorted(found, key=lambda shape: (shape[1], shape[0]))
        return [BatchDescriptor(rows, n) for n, rows in shapes]

    def _levels(self, proposal: Proposal) -> Iterable[BatchDescriptor]:
        """List the requests of further levels, few before many."""
        has_own = proposal.is_wide and self._sizes.is_adaptive
        requests = self.tree_sizes if has_own else self._rounds(1).requests
        return [BatchDescriptor(n, n, 1) for n in requests]

    def _manager(
        self, name: str, sizes: CaptureSizes, mode: CUDAGraphMode, query_len: int
    ) -> CudaGraphManager:
        breaks = not self._config.compile_piecewise
        manager = CudaGraphManager(
            name, sizes, mode, query_len, self._backend, use_breakable_cg=breaks
        )
        self.managers.append(manager)
        return manager

    @contextmanager
    def _capturing_allowed(self) -> Iterator[None]:
        """Captures happen in the body and nowhere else, so never between two requests."""
        for manager in self.managers:
            manager.set_cudagraph_capturing_enabled(True)
        try:
            yield
        finally:
            for manager in self.managers:
                manager.set_cudagraph_capturing_enabled(False)


def _mode_of(config: GraphConfig, family: str) -> CUDAGraphMode:
    """Where all batches are uniform, FULL in the config means FULL_DECODE_ONLY to the manager."""
    mode = config.modes[family]
    is_full = family in ("target_decode", "draft_decode") and mode is CUDAGraphMode.FULL
    return CUDAGraphMode.FULL_DECODE_ONLY if is_full else mode


def _full_or_none(mode: CUDAGraphMode) -> CUDAGraphMode:
    has_full = mode.decode_mode() is CUDAGraphMode.FULL
    return CUDAGraphMode.FULL_DECODE_ONLY if has_full else CUDAGraphMode.NONE


def init_piecewise(manager: CudaGraphManager, model: Callable[..., object]) -> None:
    """Prepare `model` for run_pw_graph, in the implementation that the manager was made for."""
    if manager.use_breakable_cg:
        manager.init_breakable_cg_runner(model)
    else:
        manager.init_compiled_runner(model, ["specdec::attend"])
