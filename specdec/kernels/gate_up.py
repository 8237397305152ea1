"""The first half of SwiGLU: y = silu(x Wg^T) * (x Wu^T), Wg and Wu being halves of one weight.

Both products stay in float32 accumulators until the result is rounded once.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, pick, tl
from specdec.kernels.backend import backend
from specdec.kernels.few_rows import has_few_rows, launch_few_rows
from specdec.kernels.invariant import blocked_exp
from specdec.kernels.kept import store_kept
from specdec.kernels.linear import describe, describe_rows, linear_ref, tile_options
from specdec.kernels.opaque import opaque
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs
from specdec.kernels.persistent.launch import launch_persistent
from specdec.kernels.tiles import Tiles, empty_rows, num_tiles, place_of, tiles_for


@opaque(lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0] // 2))
def gate_up(x_TD: Tensor, weight_XD: Tensor, bias_X: Tensor | None = None) -> Tensor:
    """weight_XD: [2I, D], gate rows before up rows. Returns [T, I] in x's dtype."""
    launch = backend.get().gate_up or launch_gate_up
    return pick(x_TD, launch, gate_up_ref)(x_TD, weight_XD, bias_X)


def launch_gate_up(
    x_TD: Tensor, weight_XD: Tensor, bias_X: Tensor | None, tiles: Tiles | None = None
) -> Tensor:
    """tiles: None: the fastest that are known, as everywhere but in tuning"""
    T, K = x_TD.shape
    N = len(weight_XD) // 2
    tiles = tiles or tiles_for("gate", x_TD, weight_XD)
    out_TN = empty_rows(x_TD, T, N)
    if tiles.cuts != 0:
        launch_persistent(out_TN[None], x_TD, weight_XD, bias_X, tiles, is_gated=True)
    elif has_few_rows(x_TD, tiles, is_gated=True):
        launch_few_rows(out_TN, x_TD, weight_XD, bias_X, tiles, is_gated=True)
    else:
        halves = weight_XD[:N], weight_XD[N:]
        w_descs = (describe(half, tiles.block_n, tiles.block_k) for half in halves)
        bias = weight_XD if bias_X is None else bias_X
        options = {"HAS_BIAS": bias_X is not None} | tile_options(x_TD, tiles)
        _gate_up_kernel[(num_tiles(N, T, tiles),)](
            out_TN, *describe_rows(x_TD, tiles), *w_descs, bias, T, N, K, **options
        )
    return out_TN


@jit
def _gate_up_kernel(
    out_ptr,  # [T, N]
    x_desc,  # [T, K] in tiles [BLOCK_M, BLOCK_K]
    tail_desc,  # [T, K] in tiles [TAIL, BLOCK_K]
    gate_desc,  # [N, K] in tiles [BLOCK_N, BLOCK_K]
    up_desc,  # the same
    bias_ptr,  # [2N]
    T,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    TAIL: tl.constexpr,
    PDL: tl.constexpr,
    needed_ptr=None,  # [1]; see needed.py
):
    BLOCK_N: tl.constexpr = gate_desc.block_shape[0]
    BLOCK_K: tl.constexpr = gate_desc.block_shape[1]
    BLOCK_M: tl.constexpr = x_desc.block_shape[0]
    n_tile, m_tile = place_of(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.cdiv(T, BLOCK_M + TAIL))
    n0 = n_tile * BLOCK_N
    m0 = m_tile * (BLOCK_M + TAIL)
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    wait_for_inputs(PDL)
    if needed_ptr is not None:  # noqa: SIM102  # what is compiled
        if tl.load(needed_ptr) == 0:
            return
    if TAIL > 0:
        gate_rest = tl.zeros((BLOCK_N, TAIL), tl.float32)
        up_rest = tl.zeros((BLOCK_N, TAIL), tl.float32)
        for i in range(tl.cdiv(K, BLOCK_K)):
            w_gate, w_up = gate_desc.load([n0, i * BLOCK_K]), up_desc.load([n0, i * BLOCK_K])
            x = tl.trans(x_desc.load([m0, i * BLOCK_K]))
            x_rest = tl.trans(tail_desc.load([m0 + BLOCK_M, i * BLOCK_K]))
            gate = tl.dot(w_gate, x, gate, input_precision="ieee")
            up = tl.dot(w_up, x, up, input_precision="ieee")
            gate_rest = tl.dot(w_gate, x_rest, gate_rest, input_precision="ieee")
            up_rest = tl.dot(w_up, x_rest, up_rest, input_precision="ieee")
        let_the_next_start(PDL)
        store_gated(out_ptr, bias_ptr, gate_rest, up_rest, n0, m0 + BLOCK_M, T, N, HAS_BIAS)
    else:
        for i in range(tl.cdiv(K, BLOCK_K)):
            x = tl.trans(x_desc.load([m0, i * BLOCK_K]))
            gate = tl.dot(gate_desc.load([n0, i * BLOCK_K]), x, gate, input_precision="ieee")
            up = tl.dot(up_desc.load([n0, i * BLOCK_K]), x, up, input_precision="ieee")
        let_the_next_start(PDL)
    store_gated(out_ptr, bias_ptr, gate, up, n0, m0, T, N, HAS_BIAS)


@jit
def store_gated(out_ptr, bias_ptr, gate, up, n0, m0, T, N, HAS_BIAS: tl.constexpr):
    """Add biases, apply silu, round once, and store."""
    n = n0 + tl.arange(0, gate.shape[0])
    m = m0 + tl.arange(0, gate.shape[1])
    if HAS_BIAS:
        gate += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    y = gate / (1.0 + tl.exp(-gate)) * up
    out = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    store_kept(out, y.to(out_ptr.dtype.element_ty), (n < N)[:, None] & (m < T)[None, :])


def gate_up_ref(x_TD: Tensor, weight_XD: Tensor, bias_X: Tensor | None) -> Tensor:
    gate_TI, up_TI = linear_ref(x_TD, weight_XD, bias_X, torch.float32).chunk(2, dim=-1)
    return (gate_TI / (1.0 + blocked_exp(-gate_TI)) * up_TI).to(x_TD.dtype)
