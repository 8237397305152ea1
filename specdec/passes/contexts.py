"""The forward context of each kind of pass over one model's cache.

A pass that runs eagerly or in pieces knows the requests of its step and the longest of them. A full
graph serves every step of its shape, so it knows only what holds for all of them: the largest
context, and its own query tiles.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from graphs.context import ForwardContext
from graphs.dispatch import Dispatch
from graphs.modes import BatchDescriptor, CUDAGraphMode
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
        self.buffers = buffers
        self.max_model_len = max_model_len
        self._metadata = partial(
            AttentionMetadata, kv_cache=kv_cache, workspace=workspace, block_table=state.block_table
        )
        sizes = buffers.sizes
        # the kernels need no tiles
        self._plans = None if kv_cache.is_cuda else TilePlans(sizes.max_tokens, sizes.max_reqs)

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
        metadata = self._metadata(
            idx_mapping=self.buffers.idx_mapping[:B],
            positions=self.buffers.positions[:T],
            slot_mapping=self.buffers.slot_mapping[:T],
            max_query_len=Q,
            max_seq_len=self.max_model_len,
            tiles=None if self._plans is None else self._plans.uniform(B, Q),
        )
        return self._context(_how(CUDAGraphMode.FULL, desc, warmup), metadata=metadata)

    def draft_rows(self, num_reqs: int, max_seq_len: int, how: Dispatch) -> ForwardContext:
        """One row of the draft's own per request."""
        B = num_reqs
        metadata = self._metadata(
            idx_mapping=self.buffers.sample_mapping[:B],
            positions=self.buffers.draft_positions[:B],
            slot_mapping=self.buffers.draft_slots[:B],
            max_query_len=1,
            max_seq_len=min(max_seq_len, self.max_model_len),
            tiles=None if self._plans is None else self._plans.uniform(B, 1),
        )
        return self._context(how, metadata=metadata)

    def dummy_draft_rows(self, desc: BatchDescriptor, warmup: bool) -> ForwardContext:
        """One row of the draft's own per request, for a full graph."""
        self.buffers.fill_padding([1] * desc.num_tokens)
        how = _how(CUDAGraphMode.FULL, desc, warmup)
        return self.draft_rows(desc.num_tokens, self.max_model_len, how)

    def _rows(self, query_lens: Sequence[int], max_seq_len: int, how: Dispatch) -> ForwardContext:
        B = len(query_lens)
        T = how.descriptor.num_tokens
        metadata = self._metadata(
            idx_mapping=self.buffers.idx_mapping[:B],
            positions=self.buffers.positions[:T],
            slot_mapping=self.buffers.slot_mapping[:T],
            query_start_loc=self.buffers.query_start_loc[: B + 1],
            max_query_len=max(query_lens),
            max_seq_len=max_seq_len,
            tiles=None if self._plans is None else self._plans.ragged(query_lens, T),
        )
        return self._context(how, metadata=metadata)

    def _context(self, how: Dispatch, *, metadata: AttentionMetadata) -> ForwardContext:
        return ForwardContext(
            attn_metadata=metadata,
            slot_mapping=metadata.slot_mapping,
            num_tokens=len(metadata.positions),
            runtime_mode=how.mode,
            batch_descriptor=how.descriptor,
        )


def _how(mode: CUDAGraphMode, desc: BatchDescriptor, warmup: bool) -> Dispatch:
    """A warm-up runs eagerly, on the sizes of the capture."""
    return Dispatch(CUDAGraphMode.NONE if warmup else mode, desc)
