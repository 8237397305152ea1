"""The target's three passes: prefill a chunk, sample behind the prompts that ended, verify a round."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from graphs.context import ForwardContext, set_forward_context
from graphs.manager import CudaGraphManager
from graphs.modes import BatchDescriptor, CUDAGraphMode
from specdec.kernels.best_token import StopMask, best_token
from specdec.models.llama import LlamaModel
from specdec.passes.contexts import PassContexts
from specdec.passes.families import init_piecewise
from specdec.sampler.sampler import Choice
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.logprobs import StepLogprobs
from specdec.stepping.state import RequestState
from specdec.stepping.step_sizes import Step


class Target:
    """Reads and writes the step buffers; returns nothing.

    Graphs hold the model's forward: prefill_graphs in pieces around attention, decode_graphs whole for rounds of K + 1
    rows, plain_graphs for rounds in which nobody drafts. Tokens are chosen behind them, by what a step needs.
    """

    def __init__(
        self,
        model: LlamaModel,
        contexts: PassContexts,
        buffers: StepBuffers,
        state: RequestState,
        prefill_graphs: CudaGraphManager,
        decode_graphs: CudaGraphManager,
        plain_graphs: CudaGraphManager | None,
        choice: Choice,
    ) -> None:
        self.model, self.contexts, self.buffers, self.state = model, contexts, buffers, state
        self.prefill_graphs, self.decode_graphs = prefill_graphs, decode_graphs
        self.plain_graphs, self.choice = plain_graphs, choice
        self._forward = into_buffers(model)
        init_piecewise(prefill_graphs, self._forward)

    def prefill(self, step: Step) -> None:
        """Hidden states, aux hidden states and KV of the chunk's rows."""
        self._prefill(self.contexts.rows(step, step.passes.target))

    def sample(self, step: Step) -> None:
        """The target's choice behind each batch slot's last row."""
        if step.needs.logits:
            self.choice.choose_first(step)
            return
        buffers, B = self.buffers, step.num_reqs
        last_B = buffers.last_token_indices[:B]
        mask = self._stop_mask(buffers.positions[last_B], buffers.sample_mapping[:B])
        best_token(buffers.hidden_states[last_B], self.model.lm_head.weight, buffers.sampled_tokens[:B, 0], mask)

    def verify(self, step: Step) -> None:
        """The target's choice behind every row of the round, its features and its KV."""
        how = step.passes.target
        if how.mode is CUDAGraphMode.FULL:
            is_plain = self.plain_graphs is not None and not step.has_drafts
            graphs = self.plain_graphs if is_plain else self.decode_graphs
            assert graphs is not None, step
            graphs.run_fullgraph(how.descriptor)
        else:
            self._run_forward(self.contexts.rows(step, how))
        if step.needs.logits:
            self.choice.choose_round(step)
        else:
            self._choose_best(step.num_tokens, step.num_reqs)

    def record(self, step: Step) -> StepLogprobs | None:
        """Behind the commit: what the state keeps of the step's tokens, and their logprobs if asked for."""
        return self.choice.record(step, step.num_reqs) if step.needs.logits else None

    def make_prefill(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        """A forward of padding, to warm up and capture."""
        return partial(self._prefill, self.contexts.dummy_rows(desc, warmup))

    def make_verify(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        """The forward of a round of padding, to warm up and capture."""
        return partial(self._run_forward, self.contexts.dummy_round(desc, warmup))

    def _prefill(self, context: ForwardContext) -> None:
        with set_forward_context(context):
            self.prefill_graphs.run_pw_graph(self._forward, self._inputs(context.num_tokens))

    def _choose_best(self, num_tokens: int, num_reqs: int) -> None:
        buffers, T = self.buffers, num_tokens
        mask = self._stop_mask(buffers.positions[:T], buffers.idx_mapping[:num_reqs])
        best_token(buffers.hidden_states[:T], self.model.lm_head.weight, buffers.target_tokens[:T], mask)

    def _run_forward(self, context: ForwardContext) -> None:
        with set_forward_context(context):
            self._forward(**self._inputs(context.num_tokens))

    def _inputs(self, num_tokens: int) -> dict[str, Tensor]:
        buffers, T = self.buffers, num_tokens
        return {
            "input_ids_T": buffers.input_ids[:T],
            "hidden_out_TD": buffers.hidden_states[:T],
            "aux_out_TE": buffers.aux_hidden_states[:T],
        }

    def _stop_mask(self, positions: Tensor, idx_mapping: Tensor) -> StopMask:
        state = self.state
        return StopMask(
            positions=positions,
            idx_mapping=idx_mapping,
            min_positions=state.min_positions,
            stop_ids=state.stop_ids,
        )


def into_buffers(model: LlamaModel) -> Callable[..., None]:
    """The model's forward as a graph takes it: results go to tensors that it is given."""

    def forward(input_ids_T: Tensor, hidden_out_TD: Tensor, aux_out_TE: Tensor) -> None:
        hidden_out_TD.copy_(model(input_ids_T, aux_out_TE))

    return forward
