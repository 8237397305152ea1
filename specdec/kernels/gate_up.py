"""The first half of SwiGLU: y = silu(x Wg^T) * (x Wu^T), Wg and Wu being the two halves of one weight.

Both products stay in float32 accumulators until the result is rounded once.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, tl, use_triton
from specdec.kernels.invariant import blocked_exp
from specdec.kernels.linear import linear_ref
from specdec.kernels.tiles import choose_tiles, gpu_name, row_class


def gate_up(x_TD: Tensor, weight_XD: Tensor, bias_X: Tensor | None = None) -> Tensor:
    """weight_XD: [2I, D], gate rows before up rows. Returns [T, I] in x's dtype."""
    if use_triton(x_TD):
        return launch_gate_up(x_TD, weight_XD, bias_X)
    return gate_up_ref(x_TD, weight_XD, bias_X)


def launch_gate_up(x_TD: Tensor, weight_XD: Tensor, bias_X: Tensor | None) -> Tensor:
    assert x_TD.stride(1) == 1, x_TD.stride()
    assert weight_XD.is_contiguous(), weight_XD.stride()
    T, K = x_TD.shape
    N = len(weight_XD) // 2
    tiles = choose_tiles(row_class(T), 2 * N, K, x_TD.dtype, gpu_name(x_TD.device), may_split=False)
    out_TN = torch.empty(T, N, dtype=x_TD.dtype, device=x_TD.device)
    block_n = max(tiles.block_n // 2, 64)
    _gate_up_kernel[(-(-N // block_n), -(-T // tiles.block_m))](
        out_TN,
        x_TD,
        weight_XD,
        weight_XD if bias_X is None else bias_X,
        x_TD.stride(0),
        T,
        N,
        K,
        HAS_BIAS=bias_X is not None,
        BLOCK_N=block_n,
        BLOCK_M=tiles.block_m,
        BLOCK_K=tiles.block_k,
        IS_EVEN=N % block_n == 0 and K % tiles.block_k == 0,
        PRECISION="ieee" if x_TD.dtype == torch.float32 else "tf32",
        num_stages=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    return out_TN


@jit
def _gate_up_kernel(
    out_ptr,  # [T, N]
    x_ptr,  # [T, K]
    w_ptr,  # [2N, K]
    bias_ptr,  # [2N]
    stride_x,
    T,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    gate_w = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    up_w = gate_w + N.to(tl.int64) * K
    x = x_ptr + m[None, :] * stride_x + k[:, None]
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i in range(tl.cdiv(K, BLOCK_K)):
        if IS_EVEN:
            gate_tile, up_tile = tl.load(gate_w), tl.load(up_w)
            x_tile = tl.load(x, mask=(m < T)[None, :], other=0.0)
        else:
            inside = k + i * BLOCK_K < K
            mask = (n < N)[:, None] & inside[None, :]
            gate_tile, up_tile = tl.load(gate_w, mask=mask, other=0.0), tl.load(up_w, mask=mask, other=0.0)
            x_tile = tl.load(x, mask=(m < T)[None, :] & inside[:, None], other=0.0)
        gate = tl.dot(gate_tile, x_tile, gate, input_precision=PRECISION)
        up = tl.dot(up_tile, x_tile, up, input_precision=PRECISION)
        gate_w += BLOCK_K
        up_w += BLOCK_K
        x += BLOCK_K
    if HAS_BIAS:
        gate += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    y = gate / (1.0 + tl.exp(-gate)) * up
    out = out_ptr + m[None, :] * N + n[:, None]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < T)[None, :])


def gate_up_ref(x_TD: Tensor, weight_XD: Tensor, bias_X: Tensor | None = None) -> Tensor:
    gate_TI, up_TI = linear_ref(x_TD, weight_XD, bias_X, torch.float32).chunk(2, dim=-1)
    return (gate_TI / (1.0 + blocked_exp(-gate_TI)) * up_TI).to(x_TD.dtype)
