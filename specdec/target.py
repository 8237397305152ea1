"""The target's three passes: prefill a chunk, sample behind the prompts that ended, verify a round."""

from torch import Tensor

from graphs.context import ForwardContext, set_forward_context
from specdec.attention import AttentionMetadata
from specdec.buffers import StepBuffers
from specdec.kernels.paged_attention import plan_tiles
from specdec.models.llama import LlamaModel
from specdec.processors import mask_stop_tokens
from specdec.state import RequestState
from specdec.step import Step


class Target:
    """Reads and writes the step buffers; returns nothing."""

    def __init__(self, model: LlamaModel, kv_cache: Tensor, buffers: StepBuffers, state: RequestState) -> None:
        self.model, self.kv_cache, self.buffers, self.state = model, kv_cache, buffers, state

    def prefill(self, step: Step) -> None:
        """Hidden states, aux hidden states and KV of the chunk's rows."""
        self._forward(step)

    def sample(self, step: Step) -> None:
        """The target's choice behind each batch slot's last row."""
        buffers, B = self.buffers, step.num_reqs
        row_B, last_B = buffers.sample_mapping[:B], buffers.last_token_indices[:B]
        buffers.sampled_tokens[:B, 0] = self._choose(buffers.hidden_states[last_B], buffers.positions[last_B], row_B)

    def verify(self, step: Step) -> None:
        """The target's choice behind every row of the round, its features and its KV."""
        self._forward(step)
        buffers, T, Q = self.buffers, step.num_tokens, step.num_tokens // step.num_reqs
        row_T = buffers.idx_mapping[: step.num_reqs, None].expand(-1, Q).reshape(T)
        buffers.target_tokens[:T] = self._choose(buffers.hidden_states[:T], buffers.positions[:T], row_T)

    def _choose(self, hidden_XD: Tensor, positions_X: Tensor, row_X: Tensor) -> Tensor:
        """The best token behind each row, the lowest id among equals."""
        logits_XV = self.model.logits(hidden_XD)
        mask_stop_tokens(logits_XV, positions_X, self.state.min_positions[row_X], self.state.stop_ids[row_X])
        return logits_XV.argmax(dim=-1)

    def _forward(self, step: Step) -> None:
        buffers, T = self.buffers, step.num_tokens
        aux_TE = buffers.aux_hidden_states[:T]
        with set_forward_context(self._context(step)):
            hidden_TD = self.model(buffers.input_ids[:T], aux_TE)
        buffers.hidden_states[:T] = hidden_TD

    def _context(self, step: Step) -> ForwardContext:
        return step_context(step, self.kv_cache, self.buffers, self.state)


def step_context(step: Step, kv_cache: Tensor, buffers: StepBuffers, state: RequestState) -> ForwardContext:
    """The forward context of a pass over all rows of a step, the target's or the draft's."""
    T, B = step.num_tokens, step.num_reqs
    lengths = step.query_lens if step.query_len is None else (step.query_len,) * B
    metadata = AttentionMetadata(
        kv_cache=kv_cache,
        block_table=state.block_table,
        idx_mapping=buffers.idx_mapping[:B],
        positions=buffers.positions[:T],
        slot_mapping=buffers.slot_mapping[:T],
        query_start_loc=None if step.query_len is not None else buffers.query_start_loc[: B + 1],
        max_query_len=max(lengths),
        max_seq_len=step.max_seq_len,
        tiles=None if buffers.positions.is_cuda else plan_tiles(lengths, T, buffers.positions.device),
    )
    return ForwardContext(attn_metadata=metadata, slot_mapping=metadata.slot_mapping, num_tokens=T)
