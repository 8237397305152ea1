"""From one product to the keys and values of all layers: what a block draft caches of its context.

Every layer makes its keys and values of the same rows, so one product has those of all layers, keys
before values in each. Here it is finished, the heads of keys are normed and rotated, and both go to
the layers' caches: as rotate_and_store.py does for one layer, with its bits.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, tl, use_triton
from specdec.kernels.head_columns import block_of
from specdec.kernels.linear import Sums
from specdec.kernels.norms import rms_norm_ref
from specdec.kernels.overlap import let_the_next_start, loaded_before, wait_for_inputs_knowing
from specdec.kernels.rotate_and_store import Rope, Rows, rotary_ref
from specdec.kernels.sum_order import added


class KeyNorms(NamedTuple):
    """Weights [L, C] of the norms over each key head, of every layer."""

    k_LC: Tensor
    eps: float


def store_context(kv: Sums, rope: Rope, norms: KeyNorms | None, rows: Rows, caches: Tensor) -> None:
    """Cache keys and values of T rows in every layer; slot -1 is skipped.

    kv:     unfinished [T, L 2G C]; its launch is later than what writes the rows
    caches: [L, 2, N + 1, G, S, C], written in place
    """
    assert kv.weights_TS is None, "parts of experts are no keys"
    if not use_triton(caches):
        store_context_ref(kv, rope, norms, rows, caches)
        return
    splits, T, _ = kv.parts_STN.shape
    L, _, _, G, S, C = caches.shape
    cos, sin = rope
    bias = cos if kv.bias_N is None else kv.bias_N
    k_norm, eps = (cos, 0.0) if norms is None else norms
    heads = math.gcd(G, 8)
    strides = caches.stride()[:2]
    sizes = {"L": L, "G": G, "S": S, "C": C, "HEADS": heads, "SPLITS": splits}
    flags = {"HAS_BIAS": kv.bias_N is not None, "HAS_NORMS": norms is not None}
    options = {"num_warps": 2} | launch_options(caches)
    _store_context_kernel[(T, L * 2 * G // heads)](
        *(caches, kv.parts_STN, bias, cos, sin, k_norm, *rows, T, *strides, eps),
        **sizes,
        **flags,
        **options,
    )


@jit(varying=("T",))
def _store_context_kernel(
    caches_ptr,  # [L, 2, N + 1, G, S, C]
    parts_ptr,  # [SPLITS, T, L 2G C] float32, or rounded
    bias_ptr,  # [L 2G C]
    cos_ptr,  # [positions, C/2]
    sin_ptr,  # [positions, C/2]
    k_norm_ptr,  # [L, C]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    T,
    stride_layer,
    stride_values,
    eps,
    L: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_the_next_start(PDL)
    X: tl.constexpr = L * 2 * G * C
    half: tl.constexpr = C // 2
    c = tl.arange(0, block_of(C) // 2)
    is_there, are_there, other = None, None, None  # all columns are there: no masks
    if c.shape[0] != half:
        is_there, are_there, other = c < half, (c < half)[None, :], 0.0
    # all heads of a program are keys, or values, of one layer: HEADS divides G
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    layer, place = first // (2 * G), first % (2 * G)
    is_value = place // G
    # known before the product, so looked up while it ends
    slot = tl.load(slots_ptr + t, cache_modifier=".cg")
    position = tl.load(positions_ptr + t, cache_modifier=".cg")
    cos = loaded_before(tl.load(cos_ptr + position * half + c, is_there, other), PDL)[None, :]
    sin = loaded_before(tl.load(sin_ptr + position * half + c, is_there, other), PDL)[None, :]
    wait_for_inputs_knowing(slot.to(tl.int32) + 1, position.to(tl.int32), PDL)
    if slot < 0:
        return
    head = tl.arange(0, HEADS)
    dtype = caches_ptr.dtype.element_ty
    column = (first + head)[:, None] * C + c[None, :]
    low = added(parts_ptr, t, T, X, column, are_there, other, SPLITS)
    high = added(parts_ptr, t, T, X, column + half, are_there, other, SPLITS)
    if HAS_BIAS:
        low += tl.load(bias_ptr + column, are_there, other).to(tl.float32)
        high += tl.load(bias_ptr + column + half, are_there, other).to(tl.float32)
    low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    if is_value == 0:
        if HAS_NORMS:
            norm_ptr = k_norm_ptr + layer * C
            k_low = tl.load(norm_ptr + c, is_there, other).to(tl.float32)
            k_high = tl.load(norm_ptr + c + half, is_there, other).to(tl.float32)
            squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
            scale = (1.0 / tl.sqrt(squares / C + eps))[:, None]
            low = (low * scale * k_low[None, :]).to(dtype).to(tl.float32)
            high = (high * scale * k_high[None, :]).to(dtype).to(tl.float32)
        # as in rotate_and_store.py: products of sin are rounded
        all_cos = tl.broadcast_to(cos, low.shape)
        low, high = tl.fma(low, all_cos, high * -sin), tl.fma(high, all_cos, low * sin)
    g = place % G + head
    at = ((slot // S * G + g) * S + slot % S)[:, None] * C + c[None, :]
    cache_ptr = (
        caches_ptr + layer.to(tl.int64) * stride_layer + is_value.to(tl.int64) * stride_values
    )
    tl.store(cache_ptr + at, low.to(dtype), are_there)
    tl.store(cache_ptr + at + half, high.to(dtype), are_there)


def store_context_ref(
    kv: Sums, rope: Rope, norms: KeyNorms | None, rows: Rows, caches: Tensor
) -> None:
    positions_T, slots_T = rows
    L, _, N, G, S, C = caches.shape
    heads_TLXC = kv.finish(caches.dtype).unflatten(1, (L, 2 * G, C))
    slot_T = torch.where(slots_T < 0, (N - 1) * S, slots_T)
    for layer, cache in enumerate(caches.unbind()):
        k, v = heads_TLXC[:, layer].split(G, dim=1)
        if norms is not None:
            k = rms_norm_ref(k, norms.k_LC[layer], norms.eps)
        cache[0].transpose(1, 2)[slot_T // S, slot_T % S] = rotary_ref(k, positions_T, *rope)
        cache[1].transpose(1, 2)[slot_T // S, slot_T % S] = v
