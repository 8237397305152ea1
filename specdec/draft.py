"""The draft's two passes: prefill over the rows of a step with true features, then K - 1 rows on its own streams.

Row t of the prefill pairs the target's feature at position t with token t + 1, and writes draft KV slot t. After a
round it covers all K + 1 rows: those behind the accepted ones are garbage that the next round overwrites.
"""

from torch import Tensor

from graphs.context import ForwardContext, set_forward_context
from specdec.attention import AttentionMetadata
from specdec.buffers import StepBuffers
from specdec.kernels.draft_inputs import fill_draft_step
from specdec.kernels.paged_attention import plan_tiles
from specdec.models.eagle import EagleModel
from specdec.state import RequestState
from specdec.step import Step
from specdec.target import step_context


class Draft:
    """Reads and writes the step buffers; its proposals end in the state rows.

    d2t: [W] target id of every draft id, or None where the vocabularies are one.
    """

    def __init__(
        self,
        model: EagleModel,
        d2t: Tensor | None,
        kv_cache: Tensor,
        buffers: StepBuffers,
        state: RequestState,
        max_model_len: int,
    ) -> None:
        self.model, self.d2t, self.kv_cache = model, d2t, kv_cache
        self.buffers, self.state, self.max_model_len = buffers, state, max_model_len
        has_taps = len(model.config.aux_boundaries) > 0
        self.source_TE = buffers.aux_hidden_states if has_taps else buffers.hidden_states

    def prefill(self, step: Step) -> None:
        """Extend the draft's KV by the step's rows and propose the first token from each seed row."""
        buffers, T, B = self.buffers, step.num_tokens, step.num_reqs
        with set_forward_context(step_context(step, self.kv_cache, buffers, self.state)):
            g_TD = self.model.features(self.source_TE[:T])
            buffers.draft_streams[:T] = self.model(buffers.draft_input_ids[:T], g_TD)
        self._propose(buffers.draft_streams[buffers.last_token_indices[:B]], B, 0)

    def decode(self, step: Step) -> None:
        """Propose tokens 2..K, one row per request each, and write all K to the state."""
        buffers, B = self.buffers, step.num_reqs
        K = buffers.draft_tokens.shape[1]
        for i in range(1, K):
            fill_draft_step(buffers, self.state, B, i, self.max_model_len)
            with set_forward_context(self._decode_context(step)):
                stream_BD = self.model(buffers.draft_last_tokens[:B], buffers.draft_hidden[:B])
            self._propose(stream_BD, B, i)
        self.state.draft_tokens[buffers.sample_mapping[:B]] = buffers.draft_tokens[:B]

    def _propose(self, stream_BD: Tensor, num_reqs: int, i: int) -> None:
        logits_BW, recycled_BD = self.model.head(stream_BD)
        token_B = logits_BW.argmax(dim=-1)
        self.buffers.draft_tokens[:num_reqs, i] = token_B if self.d2t is None else self.d2t[token_B]
        self.buffers.draft_hidden[:num_reqs] = recycled_BD

    def _decode_context(self, step: Step) -> ForwardContext:
        buffers, B = self.buffers, step.num_reqs
        metadata = AttentionMetadata(
            kv_cache=self.kv_cache,
            block_table=self.state.block_table,
            idx_mapping=buffers.sample_mapping[:B],
            positions=buffers.draft_positions[:B],
            slot_mapping=buffers.draft_slots[:B],
            max_query_len=1,
            max_seq_len=min(step.max_seq_len + buffers.draft_tokens.shape[1], self.max_model_len),
            tiles=None if buffers.positions.is_cuda else plan_tiles((1,) * B, B, buffers.positions.device),
        )
        return ForwardContext(attn_metadata=metadata, slot_mapping=metadata.slot_mapping, num_tokens=B)
