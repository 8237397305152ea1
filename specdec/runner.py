"""Models, caches and buffers of one engine, and the steps over them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from graphs.protocol import GraphBackend
from specdec.config import GraphConfig
from specdec.drafts.drafter import Drafter
from specdec.drafts.make import DraftParts, make_drafter
from specdec.kernels.attention.arguments import workspace_size
from specdec.kernels.attention.launch_plan import HeadShape, most_rows_in_parts
from specdec.kernels.cut_ids import CutIds
from specdec.models.build import allocate_kv_cache, build_target
from specdec.models.decoder import DecoderModel
from specdec.models.experts import rows_adding_experts
from specdec.parallel.exchange import Exchange
from specdec.parallel.followers import Followers
from specdec.passes.contexts import ForwardContexts
from specdec.passes.families import GraphFamilies
from specdec.requests.params import GREEDY, SamplingFlags
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.results import PendingResult, Results, StepResult
from specdec.rounds.state import RequestState
from specdec.rounds.step_sizes import RowMasks, Step
from specdec.rounds.upload import RowStart, start_rows, upload
from specdec.sampler.sampler import Sampler
from specdec.scheduling.work import PromptPart, Round
from specdec.sizes import PLAIN, DraftShape, EngineSizes
from specdec.step import Acts
from specdec.target import Target
from weights.config import LayerKind
from weights.load import LoadedEagle, LoadedTarget
from weights.shard import WHOLE, Shard


class Runner:
    """The device side of an engine: `run_step` launches a step and does not wait.

    backend: captures the graphs of `graph_config` when `capture` is called; None: all is eager.
    acceptance: the rule of steps that need logits, because a request is not plainly greedy. Greedy
        requests of such a step go through the rule too, with all probability on one token.
    confidence_threshold: above 0 drafts stop where their best paths are less probable on average.
        None: where `stop_below` says.
    exchange: how the models, a rank's parts, meet those of other ranks; None: they are whole
    """

    def __init__(
        self,
        target: LoadedTarget,
        eagle: LoadedEagle | None,
        sizes: EngineSizes,
        device: torch.device,
        *,
        graph_config: GraphConfig | None = None,
        backend: GraphBackend | None = None,
        acceptance: str = "exact",
        confidence_threshold: float | None = 0.0,
        exchange: Exchange | None = None,
    ) -> None:
        self.sizes, self.device, self.acceptance = sizes, device, acceptance
        eagle = eagle if sizes.num_speculative_tokens > 0 else None
        self.confidence_threshold = confidence_threshold
        self.threshold: Tensor | None = None  # see rounds/level.py
        self._stops_below = confidence_threshold or 0.0
        if confidence_threshold != 0 and eagle is not None:
            self.threshold = torch.tensor([self._stops_below], device=device)
        self._has_probs = sizes.is_adaptive or (self.threshold is not None and sizes.tree is None)
        self._dtype = target.tensors["embed_tokens.weight"].dtype
        self.state = self._new_state(target, eagle)
        hidden_size = target.config.hidden_size
        taps = () if eagle is None else eagle.config.aux_boundaries
        self.buffers = StepBuffers(
            sizes,
            self._dtype,
            device,
            hidden_size=hidden_size,
            aux_width=len(taps) * hidden_size,
            draft_hidden_size=0 if eagle is None else eagle.config.layer.hidden_size,
        )
        self.results = Results(self.buffers)
        kinds = [*target.local.kinds, *(() if eagle is None else (eagle.local.layer,))]
        # of each kind of attention
        self.heads = tuple(dict.fromkeys(_head_shape(kind, self._dtype) for kind in kinds))
        num_dear = rows_adding_experts(target.config.experts)
        config = graph_config or GraphConfig()
        self.graphs = GraphFamilies(config, backend, sizes, eagle is not None, num_dear)
        self.num_levels = 0  # of the draft, in all steps that were run
        self.num_tree_rounds = 0  # steps that verified trees
        self.calibration: Tensor | None = None  # see rounds/level.py
        self._workspace = _workspace(self.heads, sizes, device)
        self.exchange = exchange
        model = build_target(target, taps, sizes.max_model_len, device, exchange)
        self.target_cache = self._new_cache(target, sizes.num_tree_blocks)
        contexts = self._contexts(self.target_cache, has_paths=sizes.tree is not None)
        L = target.config.num_layers
        keeps_hidden = eagle is not None and max(taps, default=L) == L
        self.target = Target(model, contexts, self.buffers, self.graphs.target, keeps_hidden)
        self.draft = None if eagle is None else self._new_draft(eagle, model)
        self.acts = self._new_acts(target, eagle)

    @property
    def followers(self) -> Followers | None:
        """Return what tells other ranks of whatever is written to the device, or None."""
        return self.acts.followers

    @followers.setter
    def followers(self, followers: Followers | None) -> None:
        self.acts.followers = followers

    def start_rows(
        self,
        starts: Sequence[tuple[int, RowStart]] = (),
        grown: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """Give requests their state rows, and others further blocks.

        grown: (row, place in the block table, cache block) each
        """
        if self.followers is not None:
            self.followers.start_rows(starts, grown)
        start_rows(self.state, starts, grown)

    def place(self, rows: Mapping[str, np.ndarray]) -> None:
        """Write the first state rows of these tensors, to measure rounds of requests.

        rows: by name, [rows, ...]; of each row the first numbers, where it has more
        """
        if self.followers is not None:
            self.followers.place(rows)
        for name, values in rows.items():
            upload(self.rows_of(name, values.shape), values)

    def rows_of(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Find the first state rows of a tensor, and of each row the first numbers, by name."""
        rows: Tensor = getattr(self.state, name)[tuple(map(slice, shape))]
        return rows

    def run_step(
        self,
        rows: Sequence[int] = (),
        parts: Sequence[PromptPart] = (),
        *,
        max_num_computed: int | None = None,
        flags: SamplingFlags = GREEDY,
        shape: DraftShape | None = None,
        shared_rows: int = 0,
        next_shape: DraftShape | None = None,
        masks: Callable[[], RowMasks] | None = None,
    ) -> PendingResult:
        """Launch a step: a round of the requests in these state rows, and parts of prompts.

        max_num_computed: bounds the rows' computed tokens, and so the room of attention's partial
            results; needed with rows
        flags: of the requests in the rows and of those whose prompt ends
        shape, shared_rows, next_shape: see Round; None: what an engine without a planner drafts
        masks: computes those of guided rows, while the forward runs
        """
        usual = self.sizes.shape_of(len(rows) or len(parts))
        round = Round(
            state_rows=rows,
            shape=(usual if rows else PLAIN) if shape is None else shape,
            shared_rows=shared_rows,
            next_shape=usual if next_shape is None else next_shape,
            parts=parts,
        )
        step = self.step_of(round, max_num_computed, flags, masks)
        with torch.inference_mode():
            self.acts.run(step)
        self.num_tree_rounds += round.shape.is_wide
        self.num_levels += round.next_shape.levels if round.proposes else 0
        return self.results.latest

    def step_of(
        self,
        round: Round,
        max_num_computed: int | None,
        flags: SamplingFlags = GREEDY,
        masks: Callable[[], RowMasks] | None = None,
    ) -> Step:
        """Return the step of `run_step`, with the graphs that it takes."""
        bounds = [part.start + part.length for part in round.parts]
        if round.state_rows:
            assert max_num_computed is not None, "rows without a bound on their computed tokens"
            most = self.sizes.path_len if round.shape.nodes else 1
            bounds.append(min(max_num_computed + most, self.sizes.max_model_len))
        return self.bounded_step(round, max(bounds), flags, masks)

    def bounded_step(
        self,
        round: Round,
        max_seq_len: int,
        flags: SamplingFlags,
        masks: Callable[[], RowMasks] | None,
    ) -> Step:
        """Return a step with its graphs. max_seq_len: see Step"""
        values = {name: getattr(round, name) for name in Round.__slots__}
        return Step(
            **values,
            max_seq_len=max_seq_len,
            passes=self.graphs.passes(round, max_seq_len, flags.noise, not flags.logits),
            flags=flags,
            is_pq=round.num_verified > 0 and flags.logits and self.acceptance != "exact",
            masks=masks,
        )

    def calibrate(self, values: np.ndarray) -> None:
        """Judge drafts with these factors, float32 [2, K], from the next step on."""
        assert self.calibration is not None, "the number of drafts is fixed"
        if self.followers is not None:
            self.followers.calibrate(values)
        upload(self.calibration, values)

    def stop_below(self, threshold: float) -> None:
        """Stop drafts below this threshold from the next step on; below 0 padding goes on too."""
        if self.threshold is not None and threshold != self._stops_below:
            self._stops_below = threshold
            if self.followers is not None:
                self.followers.stop_below(threshold)
            self.threshold.fill_(threshold)

    @contextmanager
    def stopping_below(self, threshold: float) -> Iterator[None]:
        """Stop drafts below the threshold in the body alone."""
        before = self._stops_below
        self.stop_below(threshold)
        try:
            yield
        finally:
            self.stop_below(before)

    def take_device(self) -> None:
        """Make this engine's GPU the one to which the calling thread launches kernels."""
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)

    def read(self, num_reqs: int) -> StepResult:
        """Read the latest step's result; waits for the target, not for the draft."""
        result = self.results.latest.read()
        assert len(result.num_accepted) == num_reqs, (len(result.num_accepted), num_reqs)
        return result

    def capture(self) -> None:
        """Capture the graphs of every family; until then, and without a backend, all is eager."""
        with torch.inference_mode():
            self.graphs.capture(self.acts.captures())

    def measure(self) -> dict[str, int]:
        """Measure the graphs of each family by their largest ones, in bytes; none is kept."""
        with torch.inference_mode():
            return self.graphs.measure(self.acts.captures())

    def _new_acts(self, target: LoadedTarget, eagle: LoadedEagle | None) -> Acts:
        d2t = None if eagle is None else eagle.tensors.get("d2t")
        cut = self._cut(target.shard, target.config.vocab_size)
        made = self.target.model, self.buffers, self.state, self.acceptance, d2t, cut
        return Acts(
            target=self.target,
            sampler=Sampler(*made, self.graphs.target.choice),
            draft=self.draft,
            buffers=self.buffers,
            state=self.state,
            results=self.results,
            max_model_len=self.sizes.max_model_len,
        )

    def _new_state(self, target: LoadedTarget, eagle: LoadedEagle | None) -> RequestState:
        sizes = self.sizes
        draft_vocab_size = 0
        if eagle is not None and self.acceptance != "exact":  # p/q reads the scores of drafts
            draft_vocab_size = eagle.config.draft_vocab_size
        return RequestState(
            sizes.num_state_rows,
            sizes.widest,
            sizes.blocks_per_request,
            scratch_block=sizes.num_kv_blocks,
            device=self.device,
            vocab_size=target.config.vocab_size,
            draft_vocab_size=draft_vocab_size,
            has_probs=self._has_probs or sizes.tree is not None,
        )

    def _new_cache(self, model: LoadedTarget | LoadedEagle, num_tree_blocks: int) -> Tensor:
        config = model.local
        blocks = self.sizes.num_kv_blocks + num_tree_blocks
        return allocate_kv_cache(config.heads, config.num_layers, blocks, self._dtype, self.device)

    def _new_draft(self, eagle: LoadedEagle, target: DecoderModel) -> Drafter:
        assert self.graphs.draft is not None, "families without the draft's"
        if self._has_probs:
            K = self.sizes.num_speculative_tokens
            self.calibration = torch.ones(2, K, device=self.device)
        self.draft_cache = self._new_cache(eagle, self.sizes.num_draft_tree_blocks)
        parts = DraftParts(
            contexts=self._contexts(self.draft_cache),
            buffers=self.buffers,
            state=self.state,
            graphs=self.graphs.draft,
            rule=self.acceptance,
            sizes=self.sizes,
            calibration=self.calibration,
            threshold=self.threshold,
            exchange=self.exchange,
            cut=self._cut(eagle.shard, eagle.config.draft_vocab_size),
        )
        return make_drafter(eagle, target, parts, self.device)

    def _cut(self, shard: Shard, vocab_size: int) -> CutIds | None:
        """Say which ids a head has, if it is cut."""
        if self.exchange is None or shard == WHOLE:
            return None
        return CutIds(shard, vocab_size, self.exchange)

    def _contexts(self, kv_cache: Tensor, has_paths: bool = False) -> ForwardContexts:
        rows, bound = (self.buffers, self.state), self.sizes.max_model_len
        return ForwardContexts(kv_cache, *rows, bound, self._workspace, has_paths)


def _head_shape(kind: LayerKind, dtype: torch.dtype) -> HeadShape:
    H, G, C = kind.heads
    return HeadShape(H // G, G, C, dtype.itemsize, kind.window)


def _workspace(
    heads: tuple[HeadShape, ...], sizes: EngineSizes, device: torch.device
) -> Tensor | None:
    """Allocate attention's partial results, outside all graph pools: no two passes overlap."""
    if device.type != "cuda":
        return None
    longest = sizes.max_model_len
    wanted = max(
        workspace_size(_rows_in_parts(each, sizes), each.group * each.G, each.C, longest)
        for each in heads
    )
    return torch.empty(wanted, dtype=torch.float32, device=device)


def _rows_in_parts(heads: HeadShape, sizes: EngineSizes) -> int:
    """Bound the rows of a round whose programs share splits; long slots share their room."""
    most = most_rows_in_parts(sizes.query_len, sizes.max_num_seqs, heads)
    if sizes.tree is not None:
        widest = max(sizes.widest.rows, sizes.widest.width)
        of_trees = most_rows_in_parts(widest, sizes.max_tree_requests, heads, has_paths=True)
        most = max(most, of_trees)
    return max(min(most, sizes.max_verify_rows), 1)
