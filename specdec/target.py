"""The target's forward over the rows of a step: hidden states, the draft's features, and KV."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from graphs.context import ForwardContext, set_forward_context
from graphs.modes import BatchDescriptor, CUDAGraphMode
from specdec.models.llama import LlamaModel
from specdec.passes.contexts import PassContexts
from specdec.passes.families import Captures, TargetGraphs, init_piecewise
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.step_sizes import Step


@dataclass(eq=False)
class Target:
    """Reads and writes the step buffers; returns nothing.

    graphs: steps with prompts run in pieces around attention; rounds, plain rounds of one row per
        request, and rounds of trees beside those of chains, run as one full graph each.
    """

    model: LlamaModel
    contexts: PassContexts
    buffers: StepBuffers
    graphs: TargetGraphs

    def __post_init__(self) -> None:
        self._forward = into_buffers(self.model)
        init_piecewise(self.graphs.prefill, self._forward)

    def forward(self, step: Step) -> None:
        """One pass over all rows: in pieces, as one graph, or op by op."""
        how = step.passes.target
        if how.mode is CUDAGraphMode.PIECEWISE:
            self._run_pieces(self.contexts.rows(step, how))
        elif how.mode is CUDAGraphMode.FULL:
            self.graphs.of_descriptor(how.descriptor).run_fullgraph(how.descriptor)
        else:
            self._run_whole(self.contexts.rows(step, how))

    def captures(self) -> Captures:
        """What is captured, in order."""
        graphs = self.graphs
        kinds = (graphs.decode, graphs.plain, *graphs.trees.values())
        rounds = [each for each in kinds if each is not None]
        return [(graphs.prefill, self.make_prefill), *((each, self.make_verify) for each in rounds)]

    def make_prefill(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        """A forward of padding, to warm up and capture."""
        context = self.contexts.dummy_rows(desc, warmup)
        is_short = warmup and self.graphs.prefill.use_breakable_cg  # else it is traced, all of it
        return partial(self._warm_up if is_short else self._run_pieces, context)

    def make_verify(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        """The forward of a round of padding, plain ones too, to warm up and capture."""
        context = self.contexts.dummy_round(desc, warmup)
        return partial(self._warm_up if warmup else self._run_whole, context)

    def _warm_up(self, context: ForwardContext) -> None:
        """Run every kernel of a forward, in few layers."""
        with self.model.shortened():
            self._run_whole(context)

    def _run_pieces(self, context: ForwardContext) -> None:
        with set_forward_context(context):
            self.graphs.prefill.run_pw_graph(self._forward, self._inputs(context.num_tokens))

    def _run_whole(self, context: ForwardContext) -> None:
        with set_forward_context(context):
            self._forward(**self._inputs(context.num_tokens))

    def _inputs(self, T: int) -> dict[str, Tensor]:
        buffers = self.buffers
        return {
            "input_ids_T": buffers.input_ids[:T],
            "hidden_out_TD": buffers.hidden_states[:T],
            "aux_out_TE": buffers.aux_hidden_states[:T],
        }


def into_buffers(model: LlamaModel) -> Callable[..., None]:
    """The model's forward as a graph takes it: results go to tensors that it is given."""

    def forward(input_ids_T: Tensor, hidden_out_TD: Tensor, aux_out_TE: Tensor) -> None:
        hidden_out_TD.copy_(model(input_ids_T, aux_out_TE))

    return forward
