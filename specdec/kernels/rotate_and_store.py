"""From the qkv product to attention: finish it, norm the heads, rotate q and k, cache k and v.

Rotation in the half-split layout, pair i = (x[i], x[i + C/2]). Each of these rounds once, as if it
ran alone. The kernel skips slot -1 (padding), the twin sends it to the scratch block.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, tl, use_triton
from specdec.kernels.head_columns import block_of
from specdec.kernels.kept import store_kept
from specdec.kernels.linear import Sums
from specdec.kernels.needed import need
from specdec.kernels.norms import rms_norm_ref
from specdec.kernels.overlap import let_the_next_start, loaded_before, wait_for_inputs_knowing
from specdec.kernels.sum_order import added

Rope = tuple[Tensor, Tensor]  # cos and sin [positions, C/2] float32
Rows = tuple[Tensor, Tensor]  # positions and slots [T]


class HeadNorms(NamedTuple):
    """Weights [C] of the norms over each query and key head (Qwen3)."""

    q_C: Tensor
    k_C: Tensor
    eps: float


def rotate_and_store(
    qkv: Sums,
    rope: Rope,
    norms: HeadNorms | None,
    rows: Rows,
    cache: Tensor,
    has_queries: bool = True,
) -> Tensor:
    """Rotate queries [T, H, C] in the cache's dtype, and cache keys and values.

    qkv: unfinished [T, (H + 2G) C]; its launch is later than what writes the rows.
    cache: [2, N + 1, G, S, C] of one layer, written in place. has_queries: else they are anything
    """
    assert qkv.weights_TS is None, "parts of experts are no queries"
    if not use_triton(cache):
        return rotate_and_store_ref(qkv, rope, norms, rows, cache, has_queries)
    splits, T, X = qkv.parts_STN.shape
    _, _, G, S, C = cache.shape
    H = X // C - 2 * G
    q_THC = cache.new_empty(T, H, C)
    cos, sin = rope
    bias = cos if qkv.bias_N is None else qkv.bias_N
    q_norm, k_norm, eps = (cos, cos, 0.0) if norms is None else norms
    heads = math.gcd(math.gcd(H, G), 8)
    first_head = 0 if has_queries else H
    tensors = (q_THC, cache[0], cache[1], qkv.parts_STN, bias, cos, sin, q_norm, k_norm)
    sizes = {"H": H, "G": G, "S": S, "C": C, "HEADS": heads, "SPLITS": splits}
    flags = {"HAS_BIAS": qkv.bias_N is not None, "HAS_NORMS": norms is not None}
    options = {"num_warps": 2} | launch_options(cache) | need()
    _rotate_and_store_kernel[(T, (H + 2 * G - first_head) // heads)](
        *tensors, *rows, T, first_head, eps, **sizes, **flags, **options
    )
    return q_THC


@jit(varying=("first_head",))
def _rotate_and_store_kernel(
    q_ptr,  # [T, H, C]
    k_cache_ptr,  # [N + 1, G, S, C]
    v_cache_ptr,  # [N + 1, G, S, C]
    parts_ptr,  # [SPLITS, T, (H + 2G) C] float32, or rounded
    bias_ptr,  # [(H + 2G) C]
    cos_ptr,  # [positions, C/2]
    sin_ptr,  # [positions, C/2]
    q_norm_ptr,  # [C]
    k_norm_ptr,  # [C]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    T,
    first_head,  # those before it are left out
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    PDL: tl.constexpr,
    needed_ptr=None,  # [1]; see needed.py
):
    let_the_next_start(PDL)
    X: tl.constexpr = (H + 2 * G) * C
    half: tl.constexpr = C // 2
    c = tl.arange(0, block_of(C) // 2)
    is_there, are_there, other = None, None, None  # all columns are there: no masks
    if c.shape[0] != half:
        is_there, are_there, other = c < half, (c < half)[None, :], 0.0
    # all heads of a program are queries, or keys, or values: HEADS divides H and G
    t = tl.program_id(0).to(tl.int64)
    first = first_head + tl.program_id(1) * HEADS
    # known before the product, so looked up while it ends
    slot = tl.load(slots_ptr + t, cache_modifier=".cg")
    position = tl.load(positions_ptr + t, cache_modifier=".cg")
    cos = loaded_before(tl.load(cos_ptr + position * half + c, is_there, other), PDL)[None, :]
    sin = loaded_before(tl.load(sin_ptr + position * half + c, is_there, other), PDL)[None, :]
    wait_for_inputs_knowing(slot.to(tl.int32) + 1, position.to(tl.int32), PDL)
    if needed_ptr is not None:  # noqa: SIM102  # what is compiled
        if tl.load(needed_ptr) == 0:
            return
    if (first >= H) & (slot < 0):
        return
    head = first + tl.arange(0, HEADS)
    dtype = q_ptr.dtype.element_ty
    column = head[:, None] * C + c[None, :]
    low = added(parts_ptr, t, T, X, column, are_there, other, SPLITS)
    high = added(parts_ptr, t, T, X, column + half, are_there, other, SPLITS)
    if HAS_BIAS:
        low += tl.load(bias_ptr + column, are_there, other).to(tl.float32)
        high += tl.load(bias_ptr + column + half, are_there, other).to(tl.float32)
    low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    if first < H + G:
        if HAS_NORMS:
            q_low = tl.load(q_norm_ptr + c, is_there, other).to(tl.float32)
            q_high = tl.load(q_norm_ptr + c + half, is_there, other).to(tl.float32)
            k_low = tl.load(k_norm_ptr + c, is_there, other).to(tl.float32)
            k_high = tl.load(k_norm_ptr + c + half, is_there, other).to(tl.float32)
            squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
            scale = (1.0 / tl.sqrt(squares / C + eps))[:, None]
            low = low * scale * tl.where(first < H, q_low, k_low)[None, :]
            low = low.to(dtype).to(tl.float32)
            high = high * scale * tl.where(first < H, q_high, k_high)[None, :]
            high = high.to(dtype).to(tl.float32)
        # Products of sin are rounded. Left to compilers, the order of loads decides which ones are.
        all_cos = tl.broadcast_to(cos, low.shape)
        low, high = tl.fma(low, all_cos, high * -sin), tl.fma(high, all_cos, low * sin)
    if first < H:
        at = (t * H + head)[:, None] * C + c[None, :]
        store_kept(q_ptr + at, low.to(dtype), are_there)
        store_kept(q_ptr + at + half, high.to(dtype), are_there)
    else:
        g = (head - H) % G
        at = ((slot // S * G + g) * S + slot % S)[:, None] * C + c[None, :]
        if first < H + G:
            tl.store(k_cache_ptr + at, low.to(dtype), are_there)
            tl.store(k_cache_ptr + at + half, high.to(dtype), are_there)
        else:
            tl.store(v_cache_ptr + at, low.to(dtype), are_there)
            tl.store(v_cache_ptr + at + half, high.to(dtype), are_there)


def rotate_and_store_ref(
    qkv: Sums,
    rope: Rope,
    norms: HeadNorms | None,
    rows: Rows,
    cache: Tensor,
    has_queries: bool = True,
) -> Tensor:
    positions, slots = rows
    _, N, G, S, C = cache.shape
    heads = qkv.finish(cache.dtype).unflatten(1, (-1, C))
    q, k, v = heads.split([heads.shape[1] - 2 * G, G, G], dim=1)
    if norms is not None:
        q, k = rms_norm_ref(q, norms.q_C, norms.eps), rms_norm_ref(k, norms.k_C, norms.eps)
    both = torch.cat([q, k], dim=1) if norms is not None else heads[:, :-G]
    q, k = torch.split(rotary_ref(both, positions, *rope), [q.shape[1], G], dim=1)
    slot_T = torch.where(slots < 0, (N - 1) * S, slots)
    cache[0].transpose(1, 2)[slot_T // S, slot_T % S] = k
    cache[1].transpose(1, 2)[slot_T // S, slot_T % S] = v
    return q.contiguous()


def rotary_ref(x_THC: Tensor, positions_T: Tensor, cos_PC: Tensor, sin_PC: Tensor) -> Tensor:
    cos, sin = cos_PC[positions_T].unsqueeze(1), sin_PC[positions_T].unsqueeze(1)
    first, second = x_THC.float().chunk(2, dim=-1)
    rotated_THC = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated_THC.to(x_THC.dtype)
