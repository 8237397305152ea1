"""The target's forward over the rows of a step: hidden states, the draft's features, and KV.

Of a prompt's rows only the last one's hidden state is read later, beside keys, values and taps. So
the last layer attends and goes on only for the rows after which a token is chosen. This saves a
thirtieth of a long prompt's work. Up to SHORT_ROWS rows it finishes all: the GPU multiplies them
while it reads the weights, and one graph can serve the step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from graphs.breakable import eager_break_during_capture
from graphs.context import ForwardContext, set_forward_context
from graphs.modes import BatchDescriptor, CUDAGraphMode
from specdec.models.attention import finished_rows
from specdec.models.decoder import DecoderModel
from specdec.passes.contexts import ForwardContexts
from specdec.passes.families import Captures, TargetGraphs, init_piecewise
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.short import SHORT, SHORT_ROWS
from specdec.rounds.step_sizes import Step


@dataclass(eq=False)
class Target:
    """Reads and writes the step buffers; returns nothing.

    graphs: steps with prompts run in pieces around attention; short ones and rounds, plain ones of
        one row per request too, run as one full graph each.
    keeps_hidden: the draft reads what the last layer leaves, of all rows
    """

    model: DecoderModel
    contexts: ForwardContexts
    buffers: StepBuffers
    graphs: TargetGraphs
    keeps_hidden: bool

    def __post_init__(self) -> None:
        self._whole = into_buffers(self.model)
        self._of_prompts = self._whole if self.keeps_hidden else finishing_decided(self.model)
        is_traced = not self.graphs.prefill.use_breakable_cg  # then a break is an op, of tensors
        self._pieces = self._whole if is_traced else self._of_prompts
        init_piecewise(self.graphs.prefill, self._pieces)

    def forward(self, step: Step) -> None:
        """Run one pass over all rows: in pieces, as one graph, or op by op."""
        how = step.passes.target
        if how.mode is CUDAGraphMode.FULL:
            of_round = self.graphs.of_round(how.descriptor.query_len)
            (self.graphs.prefill if step.parts else of_round).run_fullgraph(how.descriptor)
        elif how.mode is CUDAGraphMode.PIECEWISE:
            self._run_pieces(self._context(step))
        else:
            self._run(self._of_prompts, self._context(step))

    def captures(self) -> Captures:
        """Yield what is captured, in order."""
        graphs = self.graphs
        rounds = [each for each in (graphs.decode, graphs.plain) if each is not None]
        return [(graphs.prefill, self.make_prefill), *((each, self.make_verify) for each in rounds)]

    def make_prefill(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        """Make a forward of padding, to warm up and capture."""
        if desc.kind == SHORT:
            return self._make_whole(self.contexts.dummy_short(desc, warmup), warmup)
        context = self.contexts.dummy_rows(desc, warmup)
        is_short = warmup and self.graphs.prefill.use_breakable_cg  # else all of it is traced
        return partial(self._warm_up if is_short else self._run_pieces, context)

    def make_verify(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        """Make the forward of a round of padding, plain ones too, to warm up and capture."""
        return self._make_whole(self.contexts.dummy_round(desc, warmup), warmup)

    def _make_whole(self, context: ForwardContext, warmup: bool) -> Callable[[], None]:
        if warmup:
            return partial(self._warm_up, context)
        return partial(self._run, self._whole, context)

    def _context(self, step: Step) -> ForwardContext:
        """Describe a step that runs in pieces or op by op; without prompts all rows decide."""
        how = step.passes.target
        asks = any(part.num_logprobs is not None for part in step.parts)
        is_small = how.descriptor.num_tokens <= SHORT_ROWS
        if self.keeps_hidden or asks or is_small or not step.parts:
            return self.contexts.rows(step, how)
        return self.contexts.rows_and_decided(step, how)

    def _warm_up(self, context: ForwardContext) -> None:
        """Run every kernel of a forward, in few layers."""
        with self.model.shortened():
            self._run(self._whole, context)

    def _run_pieces(self, context: ForwardContext) -> None:
        with set_forward_context(context):
            inputs = self._inputs(context.num_tokens)
            self.graphs.prefill.run_pw_graph(self._pieces, inputs)

    def _run(self, forward: Callable[..., None], context: ForwardContext) -> None:
        with set_forward_context(context):
            forward(**self._inputs(context.num_tokens))

    def _inputs(self, T: int) -> dict[str, Tensor]:
        buffers = self.buffers
        return {
            "input_ids_T": buffers.input_ids[:T],
            "hidden_out_TD": buffers.hidden_states[:T],
            "aux_out_TE": buffers.aux_hidden_states[:T],
        }


def into_buffers(model: DecoderModel) -> Callable[..., None]:
    """Wrap the model's forward for a graph: results go to tensors that it is given."""

    def forward(input_ids_T: Tensor, hidden_out_TD: Tensor, aux_out_TE: Tensor) -> None:
        hidden_out_TD.copy_(model(input_ids_T, aux_out_TE))

    return forward


def finishing_decided(model: DecoderModel) -> Callable[..., None]:
    """Wrap it so that hidden states of rows that the context leaves out stay what they were.

    The rows differ from step to step, so the end is a break of graphs in pieces, where they have
    more than a few rows.
    """
    whole = into_buffers(model)

    @eager_break_during_capture
    def finish(q_THC: Tensor, stream_TD: Tensor, hidden_out_TD: Tensor) -> None:
        rows_X = finished_rows()
        if rows_X is None:
            hidden_out_TD.copy_(model.finish(q_THC, stream_TD))
        else:
            hidden_out_TD[rows_X] = model.finish(q_THC, stream_TD, rows_X=rows_X)

    def forward(input_ids_T: Tensor, hidden_out_TD: Tensor, aux_out_TE: Tensor) -> None:
        if len(input_ids_T) <= SHORT_ROWS:
            whole(input_ids_T, hidden_out_TD, aux_out_TE)
        else:
            finish(*model.begin(input_ids_T, aux_out_TE), hidden_out_TD)

    return forward
