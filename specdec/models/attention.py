"""The two effects of a decoder layer beside its arithmetic: `store_kv`, captured, and `attend`, the only break.

Both find the cache, the slots and the lengths in the forward context. `attend` writes into a tensor that it is given,
so that a graph replayed in pieces finds the result where it was at capture. torch.compile sees two ops, in the order in
which the queries bind them.
"""

from dataclasses import dataclass, field

from torch import Tensor

from graphs.breakable import eager_break_during_capture
from graphs.context import get_forward_context
from specdec.kernels.linear import Sums
from specdec.kernels.opaque import opaque
from specdec.kernels.paged_attention import QueryRows, TilePlan, paged_attention
from specdec.kernels.rotate_and_store import HeadNorms, rotate_and_store


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where the rows of a step stand. Tensors are static buffers or slices of them."""

    kv_cache: Tensor  # [L, 2, N + 1, G, S, C]
    block_table: Tensor  # [R + 1, M] blocks of every request row; the last row is scratch
    idx_mapping: Tensor  # [B] request row per batch slot, -1 = padding
    positions: Tensor  # [T] position per row, 0 for padding
    slot_mapping: Tensor  # [T] cache slot per row, -1 = padding
    query_start_loc: Tensor | None = (
        None  # [B + 1] first row per batch slot; None: all have max_query_len rows
    )
    max_query_len: int = 1  # rows of the longest batch slot
    max_seq_len: int  # host-side bound on the longest context of the step
    tiles: TilePlan | None = None  # the twin's query tiles
    workspace: Tensor | None = None  # float32, one for all passes
    query_rows: QueryRows = field(init=False)

    def __post_init__(self) -> None:
        rows = QueryRows(
            block_table=self.block_table,
            idx_mapping=self.idx_mapping,
            positions=self.positions,
            query_start_loc=self.query_start_loc,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            tiles=self.tiles,
            workspace=self.workspace,
        )
        object.__setattr__(self, "query_rows", rows)


@opaque(lambda qkv, rope, norms, layer: _empty_queries(qkv))
def store_kv(qkv: Sums, rope: tuple[Tensor, Tensor], norms: HeadNorms | None, layer: int) -> Tensor:
    """Rotate queries and keys, write one layer's keys and values to the cache; returns the queries [T, H, C]."""
    metadata = _metadata()
    cache, slots = metadata.kv_cache[layer], metadata.slot_mapping
    return rotate_and_store(qkv, rope, norms, metadata.positions, slots, cache)


@opaque(writes="out_THC")
@eager_break_during_capture
def attend(q_THC: Tensor, out_THC: Tensor, layer: int) -> None:
    """Causal attention of every row over its request's cached keys; `out_THC` is overwritten."""
    metadata = _metadata()
    paged_attention(q_THC, out_THC, metadata.kv_cache[layer], metadata.query_rows)


def _empty_queries(qkv: Sums) -> Tensor:
    """Like the result of `store_kv`."""
    cache = _metadata().kv_cache
    _, T, X = qkv.parts_STN.shape
    G, C = cache.shape[3], cache.shape[5]
    return qkv.parts_STN.new_empty(T, X // C - 2 * G, C, dtype=cache.dtype)


def _metadata() -> AttentionMetadata:
    metadata = get_forward_context().attn_metadata
    assert isinstance(metadata, AttentionMetadata), type(metadata)
    return metadata
