"""The graph families of an engine: one CudaGraphManager per kind of forward, with its own pool.

    target.prefill  PIECEWISE  steps with prompts
    target.decode   FULL       rounds: K + 1 rows per request, of trees the root and all nodes
    target.plain    FULL       rounds of an engine with a draft in which no request drafts
    target.tree     FULL       rounds of trees, where others are of chains; and another family for
                               each smaller number of rows that those of more requests have
    draft.prefill   both       with prompts in pieces, after a round whole or in pieces; where
                               nothing is drafted, a draft of one layer extends its KV op by op
    draft.decode    FULL       K - 1 rows per request, one after another; of trees k at a time
    draft.extend    FULL       the draft's KV after a plain round, where a later one may draft

Where rows are shared out (EngineSizes.is_adaptive), target.decode and draft.prefill have graphs by
requests and rows, and draft.decode is one level, replayed for each. Where drafts are trees in some
steps (EngineSizes.has_both), draft_tree.prefill and draft_tree.decode propose them; the rows that
they come after may be of either kind, so that the draft's prefill takes them by requests and rows.
captured.py says which sizes there are.

The target's graphs end at the hidden states; its tokens are chosen after them. The draft chooses
inside its own, so steps with a sampled request have others, which draw with noise.
In counters and logs the dot is an underscore; cuda_graph_modes sets plain with target_decode.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from graphs.counters import GraphCounters
from graphs.dispatch import Dispatch
from graphs.manager import CudaGraphManager, MakeForward
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.protocol import GraphBackend
from graphs.sizes import CaptureSizes, capture_sizes
from specdec.config import GraphConfig
from specdec.passes.captured import plain_sizes, request_sizes, shared_shapes, tree_sizes
from specdec.rounds.step_sizes import BEST_CHAINS, Passes, Proposal
from specdec.sizes import EngineSizes

Captures = Sequence[tuple[CudaGraphManager, MakeForward]]  # what is captured, and how it is made


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGraphs:
    """decode: rounds of K + 1 rows per request. plain: of one row; None where K is 0.

    trees: rounds of trees, where decode serves chains, by rows of each request
    """

    prefill: CudaGraphManager
    decode: CudaGraphManager
    plain: CudaGraphManager | None
    trees: Mapping[int, CudaGraphManager]

    def of_round(self, query_len: int | None) -> CudaGraphManager:
        return self.plain if query_len == 1 and self.plain is not None else self.decode

    def of_descriptor(self, desc: BatchDescriptor) -> CudaGraphManager:
        """Find the family of a full graph."""
        tree = self.trees.get(desc.query_len or 0)
        return self.of_round(desc.query_len) if tree is None else tree


class DraftPair(NamedTuple):
    prefill: CudaGraphManager
    decode: CudaGraphManager


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftGraphs:
    """Pairs are for greedy and for sampled steps.

    usual: of all steps, or of those that propose chains where others propose trees
    extend: None where the number of drafts is fixed
    """

    usual: tuple[DraftPair, DraftPair]
    extend: CudaGraphManager | None
    trees: tuple[DraftPair, DraftPair] | None

    @property
    def prefill(self) -> CudaGraphManager:
        """The family whose pieces serve all steps: these end before a token is chosen."""
        return self.usual[0].prefill

    def of(self, proposal: Proposal) -> DraftPair:
        """Find the families whose full graphs a step runs."""
        of_trees = self.trees if proposal.is_tree else None
        return (of_trees or self.usual)[proposal.is_drawn]

    def pairs(self, has_trees: bool) -> Iterator[tuple[Proposal, DraftPair]]:
        """Yield all families, by what they propose. has_trees: all propose trees."""
        kinds = (has_trees,) if self.trees is None else (False, True)
        for is_tree, is_drawn in itertools.product(kinds, (False, True)):
            proposal = Proposal(is_drawn, is_tree)
            yield proposal, self.of(proposal)


class GraphFamilies:
    """backend: None runs every family eagerly."""

    def __init__(
        self,
        config: GraphConfig,
        backend: GraphBackend | None,
        sizes: EngineSizes,
        has_draft: bool,
    ) -> None:
        self._config = config
        self._backend = backend
        self._sizes = sizes
        Q = sizes.query_len
        self.path_len = sizes.path_len  # rows of a request in the draft's prefill after a round
        self.managers: list[CudaGraphManager] = []  # in the order of capture
        self._shared_memory: dict[str, str] = {}  # families, and those whose memory they use
        # requests of rounds of trees, where others are of chains
        self.tree_sizes = tree_sizes(sizes, config.request_sizes)
        # of rounds whose rows are shared out: (requests, rows), by rows
        self.shapes = shared_shapes(sizes, config.request_sizes)
        most = sizes.max_num_rows
        self.target = TargetGraphs(
            prefill=self._family("target_prefill", Q, most),
            decode=self._family("target_decode", Q, most),
            plain=self._plain() if has_draft else None,
            trees=self._trees() if self.tree_sizes else {},
        )
        self.draft = self._draft() if has_draft else None

    def dispatch_ragged(
        self,
        num_reqs: int,
        num_tokens: int,
        num_proposing: int,
        proposal: Proposal = BEST_CHAINS,
        num_dropped: int = 0,
    ) -> Passes:
        """Choose the graphs of a step with prompts.

        num_proposing: requests for which the draft proposes: all that run, or begin to
        num_dropped: rows beside the paths of trees, which the draft's prefill does not see
        """
        target = self.target.prefill.dispatch(num_reqs, num_tokens, None)
        if self.draft is None:
            return Passes(target=target)
        prefill = self.draft.prefill.dispatch(num_reqs, num_tokens - num_dropped, None)
        if num_proposing == 0:
            return Passes(target=target, draft_prefill=prefill)
        decode = self.draft.of(proposal).decode.dispatch(num_reqs, num_reqs, 1)
        return Passes(target=target, draft_prefill=prefill, draft_decode=decode)

    def dispatch_shared(self, num_reqs: int, num_rows: int, proposal: Proposal) -> Passes:
        """Choose the graphs of a round whose rows are shared out."""
        assert self.draft is not None, "rows are shared out among drafts"
        target = self.target.decode.dispatch(num_reqs, num_rows, None, takes_shapes=True)
        return self._drafting(target, num_reqs, num_rows, None, proposal)

    def dispatch_trees(self, num_reqs: int, proposal: Proposal) -> Passes:
        """Choose the graphs of a round of trees, where others are of chains."""
        tree = self._sizes.tree
        assert tree is not None, "sizes of chains"
        assert self.draft is not None, "nothing drafts"
        Q = tree.of(num_reqs).num_rows
        target = self.target.trees[Q].dispatch(num_reqs, num_reqs * Q, Q)
        num_paths = num_reqs
        if self.draft.of(proposal).prefill.mode.decode_mode() is CUDAGraphMode.FULL:
            # padding has paths too, and there is a shape of just their rows
            num_paths = next(n for n in self.tree_sizes if n >= num_reqs)
        num_rows = num_paths * tree.of(num_reqs).path_len
        return self._drafting(target, num_reqs, num_rows, None, proposal)

    def dispatch_extending(self, num_reqs: int) -> Passes:
        """Choose the graphs of a round of one row for each, after which nothing is drafted yet."""
        assert self.draft is not None, "nothing to extend"
        target, draft = self.target.of_round(1), self.draft.extend
        assert draft is not None, "the number of drafts is fixed"
        how, extend = (each.dispatch(num_reqs, num_reqs, 1) for each in (target, draft))
        return Passes(target=how, draft_prefill=extend)

    def dispatch_round(
        self, num_reqs: int, proposal: Proposal = BEST_CHAINS, query_len: int | None = None
    ) -> Passes:
        """Choose the graphs of a round; query_len: 1 where no request drafts, else None or all."""
        manager = self.target.of_round(query_len)
        Q = 1 if manager is self.target.plain else self._sizes.query_len
        target = manager.dispatch(num_reqs, num_reqs * Q, Q)
        if self.draft is None or manager is self.target.plain:
            return Passes(target=target)
        P = self.path_len
        return self._drafting(target, num_reqs, num_reqs * P, P, proposal)

    def _drafting(
        self,
        target: Dispatch,
        num_reqs: int,
        num_tokens: int,
        query_len: int | None,
        proposal: Proposal,
    ) -> Passes:
        assert self.draft is not None, "nothing drafts"
        draft = self.draft.of(proposal)
        shared = query_len is None
        prefill = draft.prefill.dispatch(num_reqs, num_tokens, query_len, takes_shapes=shared)
        if draft.prefill is not self.draft.prefill and prefill.mode is CUDAGraphMode.NONE:
            prefill = self.draft.prefill.dispatch(num_reqs, num_tokens, None)
        decode = draft.decode.dispatch(num_reqs, num_reqs, 1)
        return Passes(target=target, draft_prefill=prefill, draft_decode=decode)

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
            found = {manager.name: manager.measure(make) for manager, make in captures}
        for name, shared in self._shared_memory.items():
            found[name] = max(found[name] - found[shared], 0)
        return found

    def counters(self) -> dict[str, GraphCounters]:
        return {manager.name: manager.counters for manager in self.managers}

    def clear_all_graphs(self) -> None:
        """Drop every graph of this engine and give the memory back; from here on all is eager."""
        for manager in self.managers:
            manager.clear_graphs()

    def _family(self, name: str, query_len: int, max_tokens: int) -> CudaGraphManager:
        config = self._config
        max_reqs = self._sizes.max_num_seqs
        if config.token_sizes is None:
            max_tokens = min(max_tokens, max(config.max_tokens, self._sizes.max_verify_rows))
        requests = config.request_sizes or request_sizes(max_reqs, query_len)
        requests = [*requests, *self.tree_sizes]  # no graph is wider than a step of trees may be
        sizes = capture_sizes(max_reqs, max_tokens, requests, config.token_sizes)
        if self._sizes.is_adaptive and query_len > 1:
            sizes = replace(sizes, requests=(), shapes=self.shapes)
        return self._manager(name, sizes, _mode_of(config, name), query_len)

    def _plain(self) -> CudaGraphManager:
        requests = self._config.request_sizes
        most = self._sizes.max_num_seqs
        sizes = capture_sizes(most, most, plain_sizes(most) if requests is None else requests, ())
        return self._manager("target_plain", sizes, _mode_of(self._config, "target_decode"), 1)

    def _draft(self) -> DraftGraphs:
        most = self._sizes.max_num_rows
        prefill = self._family("draft_prefill", self.path_len, most)
        usual = self._with_sampled(prefill, self._family("draft_decode", 1, most))
        extend = None
        if self._sizes.is_adaptive:
            rounds = self.target.of_round(1).sizes
            extend = self._manager("draft_extend", rounds, _full_or_none(prefill.mode), 1)
        trees = self._draft_trees() if self.tree_sizes else None
        return DraftGraphs(usual=usual, extend=extend, trees=trees)

    def _trees(self) -> Mapping[int, CudaGraphManager]:
        """Make the graphs of rounds of trees, by rows of each request."""
        tree = self._sizes.tree
        assert tree is not None, "sizes of chains"
        mode = _mode_of(self._config, "target_decode")
        alike: dict[int, list[int]] = {}
        for n in self.tree_sizes:
            alike.setdefault(tree.of(n).num_rows, []).append(n)
        found = {}
        for Q, requests in alike.items():
            name = "target_tree" if tree.num_rows == Q else f"target_tree_of_{Q}_rows"
            sizes = CaptureSizes(requests=tuple(requests), tokens=())
            found[Q] = self._manager(name, sizes, mode, Q)
        return found

    def _draft_trees(self) -> tuple[DraftPair, DraftPair]:
        """For greedy and sampled steps. After few rows of chains, these are padded."""
        tree = self._sizes.tree
        assert tree is not None, "sizes of chains"
        found = {(n, n * Q) for n in self.tree_sizes for Q in (tree.of(n).path_len, self.path_len)}
        shapes = sorted(found, key=lambda shape: (shape[1], shape[0]))
        after_rows = CaptureSizes(requests=(), tokens=(), shapes=tuple(shapes))
        levels = CaptureSizes(requests=self.tree_sizes, tokens=())
        mode = _full_or_none(self._config.modes["draft_prefill"])
        of_decode = _mode_of(self._config, "draft_decode")
        prefill = self._manager("draft_tree_prefill", after_rows, mode, self.path_len)
        decode = self._manager("draft_tree_decode", levels, of_decode, 1)
        return self._with_sampled(prefill, decode)

    def _with_sampled(
        self, prefill: CudaGraphManager, decode: CudaGraphManager
    ) -> tuple[DraftPair, DraftPair]:
        """Make the families of sampled steps beside those of greedy ones, in their memory."""
        sampled = []
        for greedy, query_len in ((prefill, self.path_len), (decode, 1)):
            name, mode = f"{greedy.name}_sampled", _full_or_none(greedy.mode)
            self._shared_memory[name] = greedy.name
            sampled.append(self._manager(name, greedy.sizes, mode, query_len, shares=greedy))
        return DraftPair(prefill, decode), DraftPair(*sampled)

    def _manager(
        self,
        name: str,
        sizes: CaptureSizes,
        mode: CUDAGraphMode,
        query_len: int,
        shares: CudaGraphManager | None = None,
    ) -> CudaGraphManager:
        breaks = not self._config.compile_piecewise
        manager = CudaGraphManager(
            name, sizes, mode, query_len, self._backend, use_breakable_cg=breaks, shares=shares
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
