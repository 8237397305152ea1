"""The two effects of a decoder layer beside its arithmetic: `store_kv`, captured, and `attend`.

`attend` is the only break of a graph in pieces; it writes into a tensor that it is given, so that a
replay finds the result where it was at capture. Both find the cache, the slots and the lengths in
the forward context. torch.compile sees two ops, in the order in which the queries bind them.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphs.breakable import eager_break_during_capture
from graphs.context import get_forward_context
from specdec.kernels.attention.launch import paged_attention
from specdec.kernels.attention.query_rows import QueryRows
from specdec.kernels.backend import backend
from specdec.kernels.linear import Sums
from specdec.kernels.opaque import opaque
from specdec.kernels.rotate_and_store import HeadNorms, rotate_and_store
from specdec.kernels.tiles import empty_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """The rows of a pass, and the cache that they read and write."""

    layer_caches: tuple[Tensor, ...]  # of each layer [2, N + 1, G, S, C]
    slot_mapping: Tensor  # [T] cache slot per row, -1 = padding
    positions: Tensor  # [T] 0 = padding
    # the rows, one group after another, each with its own launch
    groups: tuple[QueryRows, ...] = field(metadata={"live": True})
    # [X] the rows that the last layer finishes, where it leaves others; and their groups
    finished_rows: Tensor | None = field(default=None, metadata={"live": True})
    finished: tuple[QueryRows, ...] = field(default=(), metadata={"live": True})


@opaque(lambda qkv, rope, norms, layer, has_queries: _empty_queries(qkv, layer))
def store_kv(
    qkv: Sums,
    rope: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
    layer: int,
    has_queries: bool = True,
) -> Tensor:
    """Rotate queries and keys, cache one layer's keys and values; returns the queries [T, H, C].

    has_queries: if not, the queries may be anything
    """
    to = _metadata()
    rows = to.positions, to.slot_mapping
    return rotate_and_store(qkv, rope, norms, rows, to.layer_caches[layer], has_queries)


@opaque(torch.empty_like)
def room_for(q_THC: Tensor) -> Tensor:
    """Allocate attention's result, which a product reads."""
    return empty_rows(q_THC, *q_THC.shape)


@opaque(writes="out_THC")
@eager_break_during_capture
def attend(
    q_THC: Tensor,
    out_THC: Tensor,
    layer: int,
    is_picked: bool,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> None:
    """Overwrite out_THC with the causal attention of every row over its request's cached keys.

    is_picked: the rows are the ones that the pass's last layer finishes, not all of the pass
    scale, window, sinks: as paged_attention has them
    """
    other = backend.get().attend
    if other is not None:
        if window is not None or sinks_H is not None:
            raise ValueError("only our own attention has windows and sinks")
        other(q_THC, out_THC, layer, is_picked)
        return
    metadata = _metadata()
    cache = metadata.layer_caches[layer]
    groups = metadata.finished if is_picked else metadata.groups
    for rows in groups:
        paged_attention(q_THC, out_THC, cache, rows, scale, window, sinks_H)
        if rows is not groups[-1]:
            q_THC, out_THC = q_THC[rows.num_rows :], out_THC[rows.num_rows :]


def cache_slots() -> Tensor:
    """List the cache slots of the pass's rows; -1: a row of padding."""
    return _metadata().slot_mapping


def rows_per_request() -> int:
    """Count the rows of each request in a pass where all have equally many."""
    [rows] = _metadata().groups
    return rows.max_query_len


def finished_rows() -> Tensor | None:
    """List the rows of the pass that the last layer finishes; None: all."""
    return _metadata().finished_rows


def _empty_queries(qkv: Sums, layer: int) -> Tensor:
    cache = _metadata().layer_caches[layer]
    _, T, X = qkv.parts_STN.shape
    *_, G, _, C = cache.shape
    return qkv.parts_STN.new_empty(T, X // C - 2 * G, C, dtype=cache.dtype)


def _metadata() -> AttentionMetadata:
    metadata = get_forward_context().attn_metadata
    assert isinstance(metadata, AttentionMetadata), type(metadata)
    return metadata
