"""The forward context of each kind of pass over one model's cache.

A pass that runs eagerly or in pieces knows the requests of its step and the longest of them. A full
graph serves every step of its shape, so it knows only what holds for all of them: the largest
context, and its own query tiles.
"""

from collections.abc import Sequence

from torch import Tensor

from graphs.context import ForwardContext
from graphs.dispatch import Dispatch
from graphs.modes import BatchDescriptor, CUDAGraphMode
from specdec.kernels.paged_attention import TilePlan
from specdec.models.attention import AttentionMetadata
from specdec.passes.tile_plans import TilePlans
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.state import RequestState
from specdec.stepping.step_sizes import Step


class PassContexts:
    """The `dummy_` ones fill the buffers with padding, to warm up and capture."""

    def __init__(
        self,
        kv_cache: Tensor,
        buffers: StepBuffers,
        state: RequestState,
        max_model_len: int,
        workspace: Tensor | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.buffers = buffers
        self.state = state
        self.max_model_len = max_model_len
        self.workspace = workspace
        # the kernels need no tiles
        sizes = None if kv_cache.is_cuda else buffers.sizes
        self._plans = None if sizes is None else TilePlans(sizes.max_tokens, sizes.max_reqs)

    def rows(self, step: Step, how: Dispatch) -> ForwardContext:
        """All rows of a step, eagerly or in pieces."""
        return self._rows(step.query_lens, step.max_seq_len, how)

    def dummy_rows(self, desc: BatchDescriptor, warmup: bool) -> ForwardContext:
        """The rows of a chunk, cut into as many requests as there may be."""
        T = desc.num_tokens
        B = min(T, self.buffers.sizes.max_reqs)
        lengths = [T // B + (b < T % B) for b in range(B)]
        self.buffers.fill_padding(lengths)
        return self._rows(lengths, 1, _how(CUDAGraphMode.PIECEWISE, desc, warmup))

    def dummy_round(self, desc: BatchDescriptor, warmup: bool) -> ForwardContext:
        """The rows of a round, for a full graph."""
        assert desc.num_reqs is not None, desc
        assert desc.query_len is not None, desc
        B = desc.num_reqs
        Q = desc.query_len
        T = desc.num_tokens
        self.buffers.fill_padding([Q] * B)
        return self._context(
            _how(CUDAGraphMode.FULL, desc, warmup),
            idx_mapping=self.buffers.idx_mapping[:B],
            positions=self.buffers.positions[:T],
            slot_mapping=self.buffers.slot_mapping[:T],
            max_query_len=Q,
            max_seq_len=self.max_model_len,
            tiles=None if self._plans is None else self._plans.uniform(B, Q),
        )

    def draft_rows(self, num_reqs: int, max_seq_len: int, how: Dispatch) -> ForwardContext:
        """One row of the draft's own per request."""
        B = num_reqs
        return self._context(
            how,
            idx_mapping=self.buffers.sample_mapping[:B],
            positions=self.buffers.draft_positions[:B],
            slot_mapping=self.buffers.draft_slots[:B],
            max_query_len=1,
            max_seq_len=min(max_seq_len, self.max_model_len),
            tiles=None if self._plans is None else self._plans.uniform(B, 1),
        )

    def dummy_draft_rows(self, desc: BatchDescriptor, warmup: bool) -> ForwardContext:
        """One row of the draft's own per request, for a full graph."""
        self.buffers.fill_padding([1] * desc.num_tokens)
        return self.draft_rows(
            desc.num_tokens, self.max_model_len, _how(CUDAGraphMode.FULL, desc, warmup)
        )

    def _rows(self, query_lens: Sequence[int], max_seq_len: int, how: Dispatch) -> ForwardContext:
        B = len(query_lens)
        T = how.descriptor.num_tokens
        return self._context(
            how,
            idx_mapping=self.buffers.idx_mapping[:B],
            positions=self.buffers.positions[:T],
            slot_mapping=self.buffers.slot_mapping[:T],
            query_start_loc=self.buffers.query_start_loc[: B + 1],
            max_query_len=max(query_lens),
            max_seq_len=max_seq_len,
            tiles=None if self._plans is None else self._plans.ragged(query_lens, T),
        )

    def _context(
        self,
        how: Dispatch,
        *,
        idx_mapping: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        max_query_len: int,
        max_seq_len: int,
        tiles: TilePlan | None,
        query_start_loc: Tensor | None = None,
    ) -> ForwardContext:
        metadata = AttentionMetadata(
            kv_cache=self.kv_cache,
            workspace=self.workspace,
            block_table=self.state.block_table,
            idx_mapping=idx_mapping,
            positions=positions,
            slot_mapping=slot_mapping,
            query_start_loc=query_start_loc,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            tiles=tiles,
        )
        return ForwardContext(
            attn_metadata=metadata,
            slot_mapping=slot_mapping,
            num_tokens=len(positions),
            runtime_mode=how.mode,
            batch_descriptor=how.descriptor,
        )


def _how(mode: CUDAGraphMode, desc: BatchDescriptor, warmup: bool) -> Dispatch:
    """A warm-up runs eagerly, on the sizes of the capture."""
    return Dispatch(CUDAGraphMode.NONE if warmup else mode, desc)
