"""The forward context of each kind of pass over one model's cache.

A pass that runs eagerly or in pieces knows the requests of its step and the longest of them. A full
graph serves every step of its shape, so it knows only the largest context and its own query tiles.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from graphs.context import ForwardContext
from graphs.dispatch import Dispatch
from graphs.modes import BatchDescriptor, CUDAGraphMode
from specdec.kernels.attention.query_rows import (
    Launches,
    Paths,
    QueryRows,
    TilePlan,
    plan_tiles,
)
from specdec.kernels.attention.splits import num_splits
from specdec.kernels.invariant import ROWS
from specdec.models.attention import AttentionMetadata
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.prompts import Interval
from specdec.rounds.short import SHORT_KEYS, num_listed_tiles
from specdec.rounds.state import RequestState
from specdec.rounds.step_sizes import Step
from specdec.rounds.upload import upload

MOST_KEPT = 1024  # shapes of rows whose prepared kernels are kept


class ForwardContexts:
    """Makes the forward contexts of one model's passes.

    The `dummy_` ones fill the buffers with padding, to warm up and capture.
    has_paths: rows of rounds with more than one row per request have paths
    """

    def __init__(
        self,
        kv_cache: Tensor,
        buffers: StepBuffers,
        state: RequestState,
        max_model_len: int,
        workspace: Tensor | None = None,
        has_paths: bool = False,
    ) -> None:
        self.buffers = buffers
        self.max_model_len = max_model_len
        self.kv_cache = kv_cache
        self._layer_caches = kv_cache.unbind()  # once, since each step with prompts asks for them
        self._has_paths = has_paths
        self._launches: dict[Hashable, Launches] = {}
        self._query_rows = partial(QueryRows, workspace=workspace, block_table=state.block_table)
        sizes = buffers.sizes
        # the kernels need no tiles
        self._tiles = (
            None if kv_cache.is_cuda else RaggedTiles(sizes.max_num_rows, sizes.max_num_seqs)
        )

    def rows(self, step: Step, how: Dispatch) -> ForwardContext:
        """All rows of a step, eagerly or in pieces: those that verify, then those of prompts."""
        T = how.descriptor.num_tokens
        V = step.num_verified
        R = step.num_verify_rows
        if not step.parts:
            B = how.descriptor.num_reqs or V
            return self._context(how, T, (self._verified(step, B, T),))
        lengths = [part.length for part in step.parts]
        prompts = self._ragged(lengths, V, Interval(R, T), step.max_seq_len, is_beside=V > 0)
        groups = (prompts,) if V == 0 else (self._verified(step, V, R), prompts)
        return self._context(how, T, groups)

    def rows_and_seeds(self, step: Step, how: Dispatch, num_seeds: int) -> ForwardContext:
        """Take all rows; the draft's last layer finishes the seeds, one row of each slot."""
        seeds = self._with_kept_launches(self._level(num_seeds, 1, step.max_seq_len))
        return _finishing(self.rows(step, how), (seeds,))

    def with_seeds(self, context: ForwardContext, num_seeds: int) -> ForwardContext:
        """Add the seeds of the first batch slots, for a graph."""
        return _finishing(context, (self._level(num_seeds, 1, self.max_model_len),))

    def rows_and_decided(self, step: Step, how: Dispatch) -> ForwardContext:
        """Take all rows; the target's last layer finishes only those that choose a token.

        These are all that verify, then the last one of each part of a prompt.
        """
        context = self.rows(step, how)
        V, B = step.num_verified, step.num_reqs
        verified = _metadata_of(context).groups[: int(V > 0)]
        last_P = self.buffers.last_token_indices[V:B]
        of_prompts = self._query_rows(
            idx_mapping=self.buffers.idx_mapping[V:B],
            positions=self.buffers.positions[last_P],
            max_seq_len=step.max_seq_len,
        )
        verified_R = torch.arange(step.num_verify_rows, device=last_P.device)
        rows_X = torch.cat([verified_R, last_P])
        return _finishing(context, (*verified, of_prompts), rows_X)

    def dummy_rows(self, desc: BatchDescriptor, warmup: bool) -> ForwardContext:
        """Cut the rows of prompts into as many requests as there may be."""
        T = desc.num_tokens
        B = min(T, self.buffers.sizes.max_num_seqs)
        lengths = _spread(T, B)
        self.buffers.fill_padding(lengths)
        how = _how(CUDAGraphMode.PIECEWISE, desc, warmup)
        return self._context(how, T, (self._ragged(lengths, 0, Interval(0, T), 1),))

    def dummy_short(self, desc: BatchDescriptor, warmup: bool) -> ForwardContext:
        """Lay out a step with prompts for a full graph, which finds its query tiles in a list."""
        buffers, T = self.buffers, desc.num_tokens
        buffers.fill_padding([])
        rows = self._query_rows(
            idx_mapping=buffers.idx_mapping,
            positions=buffers.positions[:T],
            query_start_loc=buffers.verify_start_loc,
            max_seq_len=min(SHORT_KEYS, self.max_model_len),
            listed=buffers.listed_tiles[: num_listed_tiles(T, buffers.sizes)],
        )
        return self._context(_how(CUDAGraphMode.FULL, desc, warmup), T, (rows,))

    def dummy_round(self, desc: BatchDescriptor, warmup: bool) -> ForwardContext:
        """Lay out the rows of a round, for a full graph."""
        assert desc.num_reqs is not None, desc
        B = desc.num_reqs
        T = desc.num_tokens
        Q = desc.query_len
        how = _how(CUDAGraphMode.FULL, desc, warmup)
        self.buffers.fill_padding(_spread(T, B))
        # where rows are shared, of one slot: with fewer requests than slots, even where T == B
        most = min(self.buffers.sizes.path_len, T) if Q is None else Q
        rows = self._round(B, most, T, self.max_model_len, is_shared=Q is None)
        return self._context(how, T, (rows,))

    def draft_rows(
        self, num_reqs: int, max_seq_len: int, how: Dispatch, of_trees: bool = False
    ) -> ForwardContext:
        """Describe a level of the draft's own: one row per request, or `width`."""
        found = self.buffers.candidates
        L = found.shape.width if of_trees else 1
        T = num_reqs * L
        paths = None
        if of_trees:
            paths = Paths(slots=found.path_slots[:T], starts=found.starts[:num_reqs])
        group = self._level(num_reqs, L, min(max_seq_len, self.max_model_len), paths)
        return self._context(how, T, (group,), of_draft=True)

    def dummy_draft_rows(
        self, desc: BatchDescriptor, warmup: bool, of_trees: bool
    ) -> ForwardContext:
        """Describe a level of the draft's own, for a full graph."""
        self.buffers.fill_padding([1] * desc.num_tokens)
        how = _how(CUDAGraphMode.FULL, desc, warmup)
        return self.draft_rows(desc.num_tokens, self.max_model_len, how, of_trees)

    def block_rows(
        self, num_reqs: int, rows: int, max_seq_len: int, how: Dispatch
    ) -> ForwardContext:
        """Describe blocks of so many rows: all rows of one see every key up to its end."""
        buffers, T = self.buffers, num_reqs * rows
        group = self._query_rows(
            idx_mapping=buffers.sample_mapping[:num_reqs],
            positions=buffers.block_limits[:T],
            max_query_len=rows,
            max_seq_len=min(max_seq_len, self.max_model_len),
        )
        return self._context_of(how, buffers.block_slots[:T], buffers.block_positions[:T], (group,))

    def dummy_block_rows(self, desc: BatchDescriptor, rows: int, warmup: bool) -> ForwardContext:
        """Describe blocks for a full graph, which lays them out itself."""
        self.buffers.fill_padding([1] * desc.num_tokens)
        how = _how(CUDAGraphMode.FULL, desc, warmup)
        return self.block_rows(desc.num_tokens, rows, self.max_model_len, how)

    def _with_kept_launches(self, rows: QueryRows) -> QueryRows:
        """Share prepared kernels with earlier rows of equally many slots in the same buffers.

        The kernels were prepared with the sizes below; max_seq_len decides how many splits there
        are and by that all else (key_bounds), `needed` that their results are needed (needed.py).
        """
        at = rows.idx_mapping.data_ptr(), rows.positions.data_ptr()
        sizes = len(rows.idx_mapping), len(rows.positions), num_splits(rows.max_seq_len)
        of_slot = rows.max_query_len, rows.usual_query_len
        key = *at, *sizes, *of_slot, rows.query_start_loc is None, rows.paths is None
        if key not in self._launches and len(self._launches) >= MOST_KEPT:
            self._launches.clear()
        return rows.with_launches(self._launches.setdefault(key, {}))

    def _level(
        self, num_reqs: int, rows_per_req: int, max_seq_len: int, paths: Paths | None = None
    ) -> QueryRows:
        """Describe the rows after which the draft proposes."""
        return self._query_rows(
            idx_mapping=self.buffers.sample_mapping[:num_reqs],
            positions=self.buffers.draft_positions[: num_reqs * rows_per_req],
            max_query_len=rows_per_req,
            max_seq_len=max_seq_len,
            paths=paths,
        )

    def _verified(self, step: Step, num_reqs: int, num_rows: int) -> QueryRows:
        """Describe the verify slots, from the first row on; the last rows may be padding."""
        how = step.shape.rows, num_rows, step.max_seq_len, step.shared_rows > 0
        return self._with_kept_launches(self._round(num_reqs, *how))

    def _round(
        self, num_reqs: int, most: int, num_rows: int, max_seq_len: int, is_shared: bool
    ) -> QueryRows:
        """Give each slot `most` rows, or 1 to `most`, as the device shares them out."""
        buffers = self.buffers
        starts = usual = paths = None
        if is_shared:
            starts = buffers.verify_start_loc[: num_reqs + 1]
            usual = min(-(-num_rows // num_reqs), most)
        elif self._has_paths and most > 1:
            slots = buffers.path_slots[:num_rows]
            paths = Paths(slots=slots, starts=buffers.path_starts[:num_reqs])
        return self._query_rows(
            idx_mapping=buffers.idx_mapping[:num_reqs],
            positions=buffers.positions[:num_rows],
            query_start_loc=starts,
            max_query_len=most,
            usual_query_len=usual,
            max_seq_len=max_seq_len,
            paths=paths,
        )

    def _ragged(
        self,
        lengths: Sequence[int],
        first_slot: int,
        rows: Interval,
        max_seq_len: int,
        is_beside: bool = False,
    ) -> QueryRows:
        """Describe parts of prompts of these lengths; the last rows may be padding."""
        B = len(lengths)
        num_rows = rows.end - rows.first
        return self._query_rows(
            idx_mapping=self.buffers.idx_mapping[first_slot : first_slot + B],
            positions=self.buffers.positions[slice(*rows)],
            query_start_loc=self.buffers.prompt_start_loc[: B + 1],
            max_query_len=max(lengths),
            max_seq_len=max_seq_len,
            tiles=None if self._tiles is None else self._tiles.plan(lengths, num_rows),
            is_beside=is_beside,
        )

    def _context(
        self, how: Dispatch, num_rows: int, groups: tuple[QueryRows, ...], of_draft: bool = False
    ) -> ForwardContext:
        """Make the context of these rows. of_draft: of a level of the draft's own."""
        buffers = self.buffers
        slots = (buffers.draft_slots if of_draft else buffers.slot_mapping)[:num_rows]
        positions = (buffers.draft_positions if of_draft else buffers.positions)[:num_rows]
        return self._context_of(how, slots, positions, groups)

    def _context_of(
        self, how: Dispatch, slots_T: Tensor, positions_T: Tensor, groups: tuple[QueryRows, ...]
    ) -> ForwardContext:
        metadata = AttentionMetadata(
            layer_caches=self._layer_caches,
            slot_mapping=slots_T,
            positions=positions_T,
            groups=groups,
        )
        return ForwardContext(
            attn_metadata=metadata,
            slot_mapping=slots_T,
            num_tokens=len(slots_T),
            runtime_mode=how.mode,
            batch_descriptor=how.descriptor,
        )


def _finishing(
    context: ForwardContext, groups: tuple[QueryRows, ...], rows_X: Tensor | None = None
) -> ForwardContext:
    """Return the context of a pass whose last layer finishes only these rows.

    rows: None where the pass itself knows which they are
    """
    metadata = replace(_metadata_of(context), finished=groups, finished_rows=rows_X)
    return replace(context, attn_metadata=metadata)


def _metadata_of(context: ForwardContext) -> AttentionMetadata:
    metadata = context.attn_metadata
    assert isinstance(metadata, AttentionMetadata), type(metadata)
    return metadata


def _how(mode: CUDAGraphMode, desc: BatchDescriptor, warmup: bool) -> Dispatch:
    """Say how a dummy pass runs: a warm-up runs eagerly, on the sizes of the capture."""
    return Dispatch(CUDAGraphMode.NONE if warmup else mode, desc)


def _spread(num_rows: int, num_reqs: int) -> list[int]:
    """Give as many requests almost equally many rows."""
    return [num_rows // num_reqs + (b < num_rows % num_reqs) for b in range(num_reqs)]


class RaggedTiles:
    """Query tiles of the attention twin for batch slots with different numbers of rows.

    They lie in static memory, since a graph in pieces may check addresses.
    """

    def __init__(self, max_tokens: int, max_reqs: int) -> None:
        num_tiles = max_tokens // ROWS + max_reqs
        self._rows = torch.zeros(num_tiles * ROWS, dtype=torch.int64)
        self._reqs = torch.zeros(num_tiles, dtype=torch.int64)

    def plan(self, query_lens: Sequence[int], num_rows: int) -> TilePlan:
        """Plan the tiles of a batch; the plan lasts until the next one is made."""
        plan = plan_tiles(query_lens, num_rows, torch.device("cpu"))
        upload(self._rows, plan.rows)
        upload(self._reqs, plan.reqs)
        return TilePlan(self._rows[: len(plan.rows)], self._reqs[: len(plan.reqs)], num_rows)
