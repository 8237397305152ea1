"""The draft's two passes: prefill with the target's features, then further levels on its own.

Where rows are shared out (`varies`) the number of levels varies from step to step: a graph of one
level is replayed for each. A step that proposes nothing extends the draft's KV alone. With a
`threshold` drafts may stop before their last level (rounds/stop_drafting.py): the levels are
launched all the same, and after the stop read no weights.

Each level of a tree has k rows per request, whose nodes see the committed context and their own
ancestors (rounds/grow_tree.py); after the last level the best nodes of all are kept.

Row t of the prefill pairs the target's feature at position t with token t + 1, and writes draft KV
slot t. After a round it covers all rows of a chain; rows after the accepted ones are garbage that
the levels and the next round overwrite. Of a tree it covers the accepted path, then padding. The
last accepted row of each request, or the last row of its prompt, is the seed of the proposal. Other
rows are read as keys and values alone, so the last layer (most drafts have only one) attends and
goes on for seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from graphs.context import ForwardContext, set_forward_context
from graphs.dispatch import Dispatch
from graphs.modes import BatchDescriptor, CUDAGraphMode
from specdec.kernels.best_children import Perturbation
from specdec.kernels.gumbel import DRAFT, TARGET
from specdec.kernels.linear import linear
from specdec.kernels.needed import needed_while
from specdec.kernels.norms import add
from specdec.kernels.support_floor import support_floor
from specdec.models.eagle import EagleModel
from specdec.passes.contexts import ForwardContexts
from specdec.passes.families import Captures, DraftGraphs, init_piecewise
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.grow_tree import TreeLevel, grow_tree
from specdec.rounds.propose import DraftLevel, propose, propose_sampled
from specdec.rounds.state import RequestState
from specdec.rounds.step_sizes import Proposal, Step
from specdec.sampler.row_parameters import TextPositions, row_parameters
from specdec.sampler.sampler import scaled_in_support


@dataclass(eq=False)
class Draft:
    """Reads and writes the step buffers; its proposals end in the state rows.

    d2t: [W] target id of every draft id, or None where the vocabularies are equal
    graphs: families for steps whose requests are all greedy, and for steps with a sampled request.
        The latter draw their drafts with noise: for "exact" acceptance the target's noise, so that
        they agree; else the draft's own, and the state keeps the scores.
    calibration, threshold: see rounds/propose.py
    varies: the number of levels, from step to step
    """

    model: EagleModel
    d2t: Tensor | None
    contexts: ForwardContexts
    buffers: StepBuffers
    state: RequestState
    graphs: DraftGraphs
    rule: str
    calibration: Tensor | None = None
    threshold: Tensor | None = None
    varies: bool = False

    def __post_init__(self) -> None:
        tree = self.buffers.tree
        K = self.buffers.draft_tokens.shape[1]
        self.num_levels = K if tree is None else tree.shape.num_levels
        self._forward = into_buffers(self.model)
        init_piecewise(self.graphs.prefill, self._forward)

    def prefill(self, step: Step) -> None:
        """Extend the draft's KV by the step's rows; propose the first token from each seed row."""
        how = step.passes.draft_prefill
        assert how is not None, step
        if step.passes.extends_only:
            self._extend_only(step, how)
        elif how.mode is CUDAGraphMode.FULL:
            self.graphs.prefill.run_fullgraph(how.descriptor)
        else:
            # padding too: `decode` may be padded, and starts from what the proposal leaves
            B = step.num_proposing_reqs
            context = self.contexts.rows_and_seeds(step, how, B)
            if how.mode is CUDAGraphMode.PIECEWISE:
                self._extend(context)
            else:
                self._extend_whole(context, B)
            self._propose_first(B, step.proposal)

    def decode(self, step: Step) -> None:
        """Propose tokens 2..K, or up to the step's levels, one row per request each.

        With one level `prefill` made the only proposal, and nothing is left to do.
        """
        how = step.passes.draft_decode
        assert how is not None, step
        is_whole = not self.varies or step.next_shape.is_wide
        times = 1 if is_whole else step.next_shape.levels - 1
        if how.mode is CUDAGraphMode.FULL:
            for _ in range(times):
                self.graphs.decode.run_fullgraph(how.descriptor)
        else:
            max_seq_len = step.max_seq_len + self.num_levels
            context = self.contexts.draft_rows(
                step.num_reqs, max_seq_len, how, step.next_shape.is_wide
            )
            for _ in range(times):
                self._decode(context, step.proposal)

    def captures(self) -> Captures:
        """Yield what is captured, in order."""
        graphs = self.graphs
        extend = [] if graphs.extend is None else [(graphs.extend, self.make_extend)]
        return [(graphs.prefill, self.make_prefill), (graphs.decode, self.make_decode), *extend]

    def make_prefill(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        """Make a prefill of padding, to warm up and capture: in pieces, or a whole round."""
        if desc.num_reqs is None:
            most = self.buffers.sizes.max_reqs
            context = self.contexts.with_seeds(self.contexts.dummy_rows(desc, warmup), most)
            return partial(self._extend, context)
        context = self.contexts.with_seeds(self.contexts.dummy_round(desc, warmup), desc.num_reqs)
        return partial(self._prefill_round, context, desc.num_reqs, _proposal_of(desc))

    def make_extend(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        """Make an extension of the draft's KV by padding, to warm up and capture."""
        return partial(self._cache_rows, self.contexts.dummy_round(desc, warmup))

    def make_decode(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        """Make a decode of padding, to warm up and capture."""
        proposal = _proposal_of(desc)
        context = self.contexts.dummy_draft_rows(desc, warmup, proposal.is_wide)
        return partial(self._decode, context, proposal)

    def _extend_only(self, step: Step, how: Dispatch) -> None:
        if how.mode is CUDAGraphMode.FULL:
            assert self.graphs.extend is not None, step
            self.graphs.extend.run_fullgraph(how.descriptor)
        elif how.mode is CUDAGraphMode.PIECEWISE and not self.model.has_one_layer:
            self._extend(self.contexts.rows_and_seeds(step, how, step.num_reqs))
        else:  # of one layer these are a few products; in pieces seeds would run as well
            self._cache_rows(self.contexts.rows(step, how))

    def _cache_rows(self, context: ForwardContext) -> None:
        inputs = self._inputs(context.num_tokens)
        with set_forward_context(context):
            features_TD = self.model.features(inputs["features_TE"])
            self.model.extend(inputs["input_ids_T"], features_TD)

    def _extend(self, context: ForwardContext) -> None:
        """Run in pieces, with a seed for every request that may run: others leave garbage."""
        inputs = self._prefill_inputs(context.num_tokens, self.buffers.sizes.max_reqs)
        with set_forward_context(context):
            self.graphs.prefill.run_pw_graph(self._forward, inputs)

    def _extend_whole(self, context: ForwardContext, num_seeds: int) -> None:
        with set_forward_context(context):
            self._forward(**self._prefill_inputs(context.num_tokens, num_seeds))

    def _prefill_round(self, context: ForwardContext, num_reqs: int, proposal: Proposal) -> None:
        self._extend_whole(context, num_reqs)
        self._propose_first(num_reqs, proposal)

    def _propose_first(self, num_reqs: int, proposal: Proposal) -> None:
        buffers = self.buffers
        seed_BD = buffers.draft_hidden[:num_reqs]
        normed_BD, recycled_BD = self.model.head_input(seed_BD)
        if recycled_BD is not seed_BD:
            buffers.draft_hidden[:num_reqs] = recycled_BD
        propose = self._grow if proposal.is_wide else self._propose
        propose(normed_BD, 0, proposal.is_drawn)

    def _decode(self, context: ForwardContext, proposal: Proposal) -> None:
        decode = self._decode_tree if proposal.is_wide else self._decode_chain
        with needed_while(None if self.threshold is None else self.buffers.num_going):
            decode(context, proposal.is_drawn)

    def _decode_chain(self, context: ForwardContext, is_sampled: bool) -> None:
        buffers = self.buffers
        B = context.num_tokens
        hidden_BD = recycled_BD = buffers.draft_hidden[:B]
        levels = (None,) if self.varies else range(1, buffers.draft_tokens.shape[1])
        out_BD = hidden_BD if self.varies else None  # the next level is another replay
        with set_forward_context(context):
            for level in levels:
                last_B = buffers.draft_last_tokens[:B]
                normed_BD, recycled_BD = self.model.next_level(
                    last_B, recycled_BD, streams_out_BD=out_BD
                )
                self._propose(normed_BD, level, is_sampled)
        if self.varies and recycled_BD is not hidden_BD:
            hidden_BD.copy_(recycled_BD)

    def _propose(self, normed_BD: Tensor, level: int | None, is_sampled: bool) -> None:
        """level: None: the level after those that the state counts"""
        state = self.state
        weight_WD = self.model.lm_head.weight
        to = DraftLevel(
            buffers=self.buffers,
            state=state,
            level=level,
            d2t_W=self.d2t,
            max_model_len=self.contexts.max_model_len,
            calibration=self.calibration,
            threshold=self.threshold,
        )
        if not is_sampled:
            propose(normed_BD, weight_WD, to)
            return
        row_B = self.buffers.sample_mapping[: len(normed_BD)]
        logits_BW = linear(normed_BD, weight_WD, out_dtype=torch.float32)
        is_exact = self.rule == "exact"
        stream = TARGET if is_exact else DRAFT
        if level is None:  # the drawn token comes two after the level's own row
            places = TextPositions(self.buffers.draft_positions[: len(row_B)], row_B)
            limits, keys = row_parameters(state, row_B, places, 2, stream, not is_exact)
        else:
            limits, keys = row_parameters(state, row_B, None, 1 + level, stream, not is_exact)
        floor_B = support_floor(logits_BW, limits)
        if not is_exact:
            scores_BW = scaled_in_support(logits_BW, limits.temperatures, floor_B)
            state.draft_scores[row_B, level] = scores_BW
        propose_sampled(logits_BW, floor_B, keys._replace(token_ids=self.d2t), to)

    def _decode_tree(self, context: ForwardContext, is_sampled: bool) -> None:
        buffers = self.buffers
        X, tree = context.num_tokens, buffers.of_trees
        last_X, parent_X = buffers.draft_last_tokens[:X], tree.parent_rows[:X]
        hidden_XD = buffers.draft_hidden
        with set_forward_context(context):
            for level in range(1, tree.shape.of(X // tree.shape.top_k).num_levels):
                normed_XD, hidden_XD = self.model.next_level(last_X, hidden_XD, parent_X)
                self._grow(normed_XD, level, is_sampled)

    def _grow(self, normed_XD: Tensor, level: int, is_sampled: bool) -> None:
        shape = self.buffers.of_trees.shape
        num_reqs = len(normed_XD) // (shape.top_k if level > 0 else 1)
        to = TreeLevel(
            buffers=self.buffers,
            state=self.state,
            level=level,
            num_levels=shape.of(num_reqs).num_levels,
            d2t_W=self.d2t,
            max_model_len=self.contexts.max_model_len,
            threshold=self.threshold,
        )
        logits_XW = linear(normed_XD, self.model.lm_head.weight, out_dtype=torch.float32)
        perturbation = self._perturbation(logits_XW, to) if is_sampled else None
        grow_tree(logits_XW, to, perturbation)

    def _perturbation(self, logits_XW: Tensor, to: TreeLevel) -> Perturbation:
        P = to.rows_per_req
        row_X = self.buffers.sample_mapping[: len(logits_XW) // P].repeat_interleave(P)
        offset = 1 + to.level  # of the children, after a request's computed tokens
        limits, keys = row_parameters(self.state, row_X, None, offset, TARGET, has_epoch=False)
        floor_X = support_floor(logits_XW, limits)
        return Perturbation(floor_X, keys._replace(token_ids=self.d2t))

    def _inputs(self, T: int) -> dict[str, Tensor]:
        buffers = self.buffers
        return {
            "input_ids_T": buffers.draft_input_ids[:T],
            "features_TE": buffers.features[:T],
        }

    def _prefill_inputs(self, T: int, num_seeds: int) -> dict[str, Tensor]:
        seeds_B = self.buffers.last_token_indices[:num_seeds]
        streams_BD = self.buffers.draft_hidden[:num_seeds]
        return {**self._inputs(T), "seeds_B": seeds_B, "streams_out_BD": streams_BD}


def _proposal_of(desc: BatchDescriptor) -> Proposal:
    assert isinstance(desc.kind, Proposal), desc
    return desc.kind


def into_buffers(model: EagleModel) -> Callable[..., None]:
    """Wrap the model's forward for a graph: results go to tensors that it is given."""

    def forward(
        input_ids_T: Tensor, features_TE: Tensor, seeds_B: Tensor, streams_out_BD: Tensor
    ) -> None:
        x, residual_BD = model(input_ids_T, model.features(features_TE), seeds_B=seeds_B)
        add(x, residual_BD, streams_out_BD)

    return forward
