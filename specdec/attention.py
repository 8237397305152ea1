"""The two effects of a decoder layer beside its arithmetic: `store_kv`, captured, and `attend`, the only break.

Both find the cache, the slots and the lengths in the forward context. `attend` writes into a tensor that it is given,
so that a graph replayed in pieces finds the result where it was at capture.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphs.breakable import eager_break_during_capture
from graphs.context import get_forward_context
from specdec.kernels.paged_attention import TilePlan, paged_attention_ref
from specdec.kernels.store_kv import store_kv as write_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where the rows of a step stand. Tensors are static buffers or slices of them."""

    kv_cache: Tensor  # [L, 2, N + 1, G, S, C]
    block_table: Tensor  # [R + 1, M] blocks of every request row; the last row is scratch
    idx_mapping: Tensor  # [B] request row per batch slot, -1 = padding
    positions: Tensor  # [T] position per row, 0 for padding
    slot_mapping: Tensor  # [T] cache slot per row, -1 = padding
    tiles: TilePlan  # the twin's query tiles
    max_seq_len: int  # host-side bound on the longest context of the step


def store_kv(k_TGC: Tensor, v_TGC: Tensor, layer: int) -> None:
    """Write this step's keys and values of one layer into the cache of the forward context."""
    metadata = _metadata()
    write_cache(k_TGC, v_TGC, metadata.kv_cache[layer], metadata.slot_mapping)


def attend(q_THC: Tensor, out_THC: Tensor, layer: int) -> None:
    """Causal attention of every row over its request's cached keys; `out_THC` is overwritten."""
    if torch.compiler.is_compiling():
        torch.ops.specdec.attend(q_THC, out_THC, layer)
    else:
        _attend(q_THC, out_THC, layer)


@eager_break_during_capture
def _attend(q_THC: Tensor, out_THC: Tensor, layer: int) -> None:
    metadata = _metadata()
    block_table_BM = metadata.block_table[metadata.idx_mapping]
    paged_attention_ref(
        q_THC,
        out_THC,
        metadata.kv_cache[layer],
        block_table_BM,
        metadata.positions,
        metadata.tiles,
        metadata.max_seq_len,
    )


@torch.library.custom_op("specdec::attend", mutates_args=("out",))
def _attend_op(q: Tensor, out: Tensor, layer: int) -> None:
    _attend(q, out, layer)


def _metadata() -> AttentionMetadata:
    metadata = get_forward_context().attn_metadata
    assert isinstance(metadata, AttentionMetadata), type(metadata)
    return metadata
