"""An EAGLE head: it extends its KV by the target's features, then drafts levels on its own.

Row t of `extend` pairs the target's feature at position t with token t + 1, and writes KV slot t.
After a round it covers the rows of the accepted path, or all rows of a chain; rows after the
accepted ones are garbage that the levels and the next round overwrite. The last accepted row of
each request, or the last row of its prompt, is the seed of the proposal. Other rows are read as
keys and values alone, so the last layer (most drafts have only one) attends and goes on for seeds.

The first level is written with the seeds, in the same graph. Further levels are in one graph, or,
where their number varies from step to step, replays of a graph of one level. Levels wider than one
are always all in one graph. A step that proposes nothing (PLAIN) extends the KV alone. With
a `threshold` drafts may stop before their last level (rounds/level.py): the levels are launched all
the same, and after the stop read no weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from graphs.context import ForwardContext, set_forward_context
from graphs.dispatch import Dispatch
from graphs.modes import BatchDescriptor, CUDAGraphMode
from specdec.drafts.perturbation import perturbation
from specdec.kernels.cut_ids import CutIds
from specdec.kernels.needed import needed_while
from specdec.models.eagle import EagleModel
from specdec.passes.contexts import ForwardContexts
from specdec.passes.families import Captures, DraftGraphs, init_piecewise
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.level import DraftLevel
from specdec.rounds.propose import propose_level
from specdec.rounds.state import RequestState
from specdec.rounds.step_sizes import Proposal, Step
from specdec.sizes import EngineSizes


@dataclass(eq=False, kw_only=True)
class EagleDrafter:
    """Reads and writes the step buffers; its proposals end in the state rows.

    d2t: [W] target id of every draft id, or None where the vocabularies are equal
    graphs: families for steps whose requests are all greedy, and for steps with a sampled request.
        The latter draw their drafts with noise: for "exact" acceptance the target's noise, so that
        they agree; else the draft's own, and the state keeps the scores.
    calibration, threshold: see rounds/level.py
    cut: the draft ids that this rank's head has, where others have the rest
    """

    model: EagleModel
    d2t: Tensor | None
    contexts: ForwardContexts
    buffers: StepBuffers
    state: RequestState
    graphs: DraftGraphs
    rule: str
    sizes: EngineSizes
    calibration: Tensor | None = None
    threshold: Tensor | None = None
    cut: CutIds | None = None

    def __post_init__(self) -> None:
        self._forward = into_buffers(self.model)
        init_piecewise(self.graphs.prefill, self._forward)

    def extend(self, step: Step) -> None:
        """Extend the KV by the step's rows; write the first level, of each seed row."""
        how = step.passes.draft_prefill
        assert how is not None, step
        if step.passes.extends_only:
            self._extend_only(step, how)
        elif how.mode is CUDAGraphMode.FULL:
            self.graphs.prefill.run_fullgraph(how.descriptor)
        else:
            # padding too: `propose` may be padded, and starts from what the first level leaves
            B = step.num_proposing_reqs
            context = self.contexts.rows_and_seeds(step, how, B)
            if how.mode is CUDAGraphMode.PIECEWISE:
                self._extend_in_pieces(context)
            else:
                self._extend_whole(context, B)
            self._propose_first(B, step.proposal)

    def propose(self, step: Step) -> None:
        """Write the levels after the first: all in one go, or up to the step's number of them."""
        how = step.passes.draft_decode
        assert how is not None, step
        is_replay = self.sizes.is_adaptive and not step.next_shape.is_wide
        times = step.next_shape.levels - 1 if is_replay else 1
        if how.mode is CUDAGraphMode.FULL:
            run: Callable[[], object] = partial(self.graphs.decode.run_fullgraph, how.descriptor)
        else:
            most = step.max_seq_len + self.sizes.shape_of(1, step.proposal.is_wide).levels
            rows = self.contexts.draft_rows(step.num_reqs, most, how, step.proposal.is_wide)
            run = partial(self._propose_further, rows, step.proposal)
        for _ in range(times):
            run()

    def captures(self) -> Captures:
        """List what is captured, in order."""
        graphs = self.graphs
        extend = [] if graphs.extend is None else [(graphs.extend, self._make_extend_only)]
        return [(graphs.prefill, self._make_extend), (graphs.decode, self._make_propose), *extend]

    def _make_extend(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        """Make an extension over padding, to warm up and capture: in pieces, or a whole round."""
        B = desc.num_reqs
        if B is None:
            most = self.sizes.max_num_seqs
            rows = self.contexts.with_seeds(self.contexts.dummy_rows(desc, warmup), most)
            return partial(self._extend_in_pieces, rows)
        proposal = proposal_of(desc)
        rows = self.contexts.with_seeds(self.contexts.dummy_round(desc, warmup), B)

        def extend() -> None:
            self._extend_whole(rows, B)
            self._propose_first(B, proposal)

        return extend

    def _make_propose(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        proposal = proposal_of(desc)
        rows = self.contexts.dummy_draft_rows(desc, warmup, proposal.is_wide)
        return partial(self._propose_further, rows, proposal)

    def _make_extend_only(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        return partial(self._cache_rows, self.contexts.dummy_round(desc, warmup))

    def _extend_only(self, step: Step, how: Dispatch) -> None:
        if how.mode is CUDAGraphMode.FULL:
            assert self.graphs.extend is not None, step
            self.graphs.extend.run_fullgraph(how.descriptor)
        elif how.mode is CUDAGraphMode.PIECEWISE and not self.model.has_one_layer:
            self._extend_in_pieces(self.contexts.rows_and_seeds(step, how, step.num_reqs))
        else:  # of one layer these are a few products; in pieces seeds would run as well
            self._cache_rows(self.contexts.rows(step, how))

    def _cache_rows(self, context: ForwardContext) -> None:
        T = context.num_tokens
        with set_forward_context(context):
            features_TD = self.model.features(self.buffers.features[:T])
            self.model.extend(self.buffers.draft_input_ids[:T], features_TD)

    def _extend_in_pieces(self, context: ForwardContext) -> None:
        """Run with a seed for every request that may run: others leave garbage."""
        inputs = self._inputs(context.num_tokens, self.sizes.max_num_seqs)
        with set_forward_context(context):
            self.graphs.prefill.run_pw_graph(self._forward, inputs)

    def _extend_whole(self, context: ForwardContext, num_seeds: int) -> None:
        with set_forward_context(context):
            self._forward(**self._inputs(context.num_tokens, num_seeds))

    def _inputs(self, T: int, num_seeds: int) -> dict[str, Tensor]:
        buffers = self.buffers
        return {
            "input_ids_T": buffers.draft_input_ids[:T],
            "features_TE": buffers.features[:T],
            "seeds_B": buffers.last_token_indices[:num_seeds],
            "streams_out_BD": buffers.draft_hidden[:num_seeds],
        }

    def _propose_first(self, num_reqs: int, proposal: Proposal) -> None:
        seed_BD = self.buffers.draft_hidden[:num_reqs]
        normed_BD, recycled_BD = self.model.head_input(seed_BD)
        if recycled_BD is not seed_BD:
            seed_BD.copy_(recycled_BD)
        self._propose(normed_BD, self._level(0, num_reqs, proposal), proposal.is_drawn)

    def _propose_further(self, context: ForwardContext, proposal: Proposal) -> None:
        """Write all levels after the first, or the next one of a number that varies."""
        X = context.num_tokens
        buffers = self.buffers
        num_reqs = X // self.sizes.shape_of(1, proposal.is_wide).width
        first = self._level(0, num_reqs, proposal)
        is_replay = self.sizes.is_adaptive and not proposal.is_wide
        streams_XD = recycled_XD = buffers.draft_hidden[:X]
        parents_X = None
        if proposal.is_wide:
            streams_XD = recycled_XD = buffers.draft_hidden  # warming up, parents are anywhere
            parents_X = buffers.candidates.parent_rows[:X]
        out_XD = streams_XD if is_replay else None  # the next level is another replay
        needed = None if self.threshold is None else buffers.num_going
        with set_forward_context(context), needed_while(needed):
            for level in (None,) if is_replay else range(1, first.shape.levels):
                normed_XD, recycled_XD = self.model.next_level(
                    buffers.draft_last_tokens[:X], recycled_XD, parents_X, out_XD
                )
                self._propose(normed_XD, replace(first, level=level), proposal.is_drawn)
        if is_replay and recycled_XD is not streams_XD:
            streams_XD.copy_(recycled_XD)

    def _level(self, level: int | None, num_reqs: int, proposal: Proposal) -> DraftLevel:
        """level: None: the level after those that the buffers count"""
        return DraftLevel(
            buffers=self.buffers,
            state=self.state,
            level=level,
            shape=self.sizes.shape_of(num_reqs, proposal.is_wide),
            d2t_W=self.d2t,
            max_model_len=self.sizes.max_model_len,
            calibration=self.calibration,
            threshold=self.threshold,
            cut=self.cut,
        )

    def _propose(self, normed_XD: Tensor, to: DraftLevel, is_drawn: bool) -> None:
        draw = partial(perturbation, to, rule=self.rule) if is_drawn else None
        model = self.model
        propose_level(normed_XD, model.lm_head.weight, to, draw, model.logits_factor)


def proposal_of(desc: BatchDescriptor) -> Proposal:
    """Return what a graph of the draft proposes."""
    assert isinstance(desc.kind, Proposal), desc
    return desc.kind


def into_buffers(model: EagleModel) -> Callable[..., None]:
    """Wrap the model's forward for a graph: results go to tensors that it is given."""

    def forward(
        input_ids_T: Tensor, features_TE: Tensor, seeds_B: Tensor, streams_out_BD: Tensor
    ) -> None:
        x, residual_BD = model(input_ids_T, model.features(features_TE), seeds_B=seeds_B)
        model.add(x, residual_BD, streams_out_BD)

    return forward
