"""The target's forward over the rows of a step: hidden states, the features that the draft reads, and KV."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from graphs.context import ForwardContext, set_forward_context
from graphs.manager import CudaGraphManager
from graphs.modes import BatchDescriptor, CUDAGraphMode
from specdec.models.llama import LlamaModel
from specdec.passes.contexts import PassContexts
from specdec.passes.families import init_piecewise
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.step_sizes import Step


class Target:
    """Reads and writes the step buffers; returns nothing.

    prefill_graphs: chunks, in pieces around attention. decode_graphs: rounds of K + 1 rows, whole. plain_graphs: rounds
    of an engine with a draft in which no request drafts.
    """

    def __init__(
        self,
        model: LlamaModel,
        contexts: PassContexts,
        buffers: StepBuffers,
        prefill_graphs: CudaGraphManager,
        decode_graphs: CudaGraphManager,
        plain_graphs: CudaGraphManager | None,
    ) -> None:
        self.model, self.contexts, self.buffers = model, contexts, buffers
        self.prefill_graphs, self.decode_graphs = prefill_graphs, decode_graphs
        self.plain_graphs = plain_graphs
        self._forward = into_buffers(model)
        init_piecewise(prefill_graphs, self._forward)

    def forward(self, step: Step) -> None:
        """One pass over all rows: a chunk eagerly or in pieces, a round eagerly or as one graph."""
        how = step.passes.target
        if step.is_chunk:
            self._run_pieces(self.contexts.rows(step, how))
        elif how.mode is CUDAGraphMode.FULL:
            self._graphs_of(step).run_fullgraph(how.descriptor)
        else:
            self._run_whole(self.contexts.rows(step, how))

    def make_prefill(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        """A forward of padding, to warm up and capture."""
        return partial(self._run_pieces, self.contexts.dummy_rows(desc, warmup))

    def make_verify(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        """The forward of a round of padding, to warm up and capture."""
        return partial(self._run_whole, self.contexts.dummy_round(desc, warmup))

    def _graphs_of(self, step: Step) -> CudaGraphManager:
        is_plain = self.plain_graphs is not None and not step.has_drafts
        graphs = self.plain_graphs if is_plain else self.decode_graphs
        assert graphs is not None, step
        return graphs

    def _run_pieces(self, context: ForwardContext) -> None:
        with set_forward_context(context):
            self.prefill_graphs.run_pw_graph(self._forward, self._inputs(context.num_tokens))

    def _run_whole(self, context: ForwardContext) -> None:
        with set_forward_context(context):
            self._forward(**self._inputs(context.num_tokens))

    def _inputs(self, num_tokens: int) -> dict[str, Tensor]:
        buffers, T = self.buffers, num_tokens
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
