"""The experts' MLPs: for row t and slot s, y = down_e(silu(gate_e x) * up_e x), e = ids[t, s].

With biases these are added to the products in float32. gpt-oss has a SwiGLU of its own, clamped:
(min(max(up, -limit), limit) + 1) g / (1 + exp(-alpha g)) with g = min(gate, limit).

Each y is rounded; their sum, in the order of slots and with the router's weights, is left to the
reader of `Sums`, as splits are. Both products are those of linear.py: 16 of K after another to one
float32 accumulator, without splits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import use_triton
from specdec.kernels.experts.group import group_ref
from specdec.kernels.experts.mxfp4 import dequantised_ref
from specdec.kernels.experts.products import launch_expert_parts
from specdec.kernels.experts.weight import Weight
from specdec.kernels.fp8.quantise import quantise_ref
from specdec.kernels.fp8.weight import E4M3, GROUP, Fp8Rows, num_groups
from specdec.kernels.invariant import ALIGN, ROWS, blocked_exp
from specdec.kernels.linear import Sums
from specdec.kernels.opaque import opaque

BLOCKS = 32  # of the twin, whose weights are gathered at a time


def experts_mlp(
    x_TD: Tensor,
    ids_TS: Tensor,
    weights_TS: Tensor,
    gate_up: Weight,
    down: Weight,
    clamp: tuple[float, float] | None = None,
    codes: Fp8Rows | None = None,
) -> Sums:
    """Apply each row's experts. The parts are [k, T, D] in x's dtype; a row of padding has any.

    ids_TS, weights_TS: of `route`; an id E is no expert, and its weight is 0
    gate_up, down:      [E, 2I, D], each expert's gate rows before its up rows, and [E, D, I]
    clamp:              limit and alpha of the clamped SwiGLU; None: the plain one
    codes:              of x, for weights of 8 bits; None: they are made here
    No launch since the last synchronisation may write the weights.
    """
    return Sums(_expert_parts(x_TD, ids_TS, gate_up, down, clamp, codes), None, weights_TS)


@opaque(lambda x, ids, gate_up, down, clamp, codes: x.new_empty(ids.shape[1], *x.shape))
def _expert_parts(
    x_TD: Tensor,
    ids_TS: Tensor,
    gate_up: Weight,
    down: Weight,
    clamp: tuple[float, float] | None,
    codes: Fp8Rows | None,
) -> Tensor:
    if not use_triton(x_TD):
        return expert_parts_ref(x_TD, ids_TS, gate_up, down, clamp)
    return launch_expert_parts(x_TD, ids_TS, gate_up, down, clamp, codes=codes)


def expert_parts_ref(
    x_TD: Tensor,
    ids_TS: Tensor,
    gate_up: Weight,
    down: Weight,
    clamp: tuple[float, float] | None = None,
) -> Tensor:
    """Multiply in blocks of 8 rows of one expert; parts of padding are 0."""
    T, k = ids_TS.shape
    P, D = T * k, x_TD.shape[1]
    pair_P, tiles_M3 = group_ref(ids_TS, gate_up.num_experts, ROWS)
    expert_M, first_M, last_M = tiles_M3.long().unbind(1)
    place_MR = first_M[:, None] + torch.arange(ROWS, device=x_TD.device)
    pair_MR = pair_P.long()[place_MR.clamp(max=P - 1)]
    x_MRD = x_TD[pair_MR // k]
    gate_MRI, up_MRI = _products(x_MRD, gate_up, expert_M, parts=2).chunk(2, dim=-1)
    h_MRI = activated_ref(gate_MRI, up_MRI, clamp).to(x_TD.dtype)
    y_MRD = _products(h_MRI, down, expert_M, parts=1).to(x_TD.dtype)
    parts_PD = x_TD.new_zeros(P + 1, D)  # the last is no pair
    parts_PD[pair_MR.where(place_MR < last_M[:, None], P)] = y_MRD
    return parts_PD[:P].view(T, k, D).transpose(0, 1).contiguous()


def activated_ref(gate: Tensor, up: Tensor, clamp: tuple[float, float] | None) -> Tensor:
    """Apply either SwiGLU, in float32."""
    if clamp is None:
        return gate / (1.0 + blocked_exp(-gate)) * up
    limit, alpha = clamp
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1.0 + blocked_exp(-alpha * gate)) * (up + 1.0)


def _products(x_MRK: Tensor, weight: Weight, expert_M: Tensor, parts: int) -> Tensor:
    """Multiply each block by its expert's weight, in float32, and add the bias.

    parts: of the weight's rows, where it is packed
    """
    product = _fp8_product if weight.form == "fp8" else _product
    found = [
        product(x_BRK, weight, expert_B, parts)
        for x_BRK, expert_B in zip(x_MRK.split(BLOCKS), expert_M.split(BLOCKS), strict=True)
    ]
    y_MRN = torch.cat(found)
    return y_MRN if weight.bias_EN is None else y_MRN + weight.bias_EN.float()[expert_M][:, None]


def _product(x_BRK: Tensor, weight: Weight, expert_B: Tensor, parts: int) -> Tensor:
    N, K = weight.num_rows, x_BRK.shape[2]
    weight_BNK = _of_experts(weight, expert_B, parts)[..., :K]
    weight_BNK = F.pad(weight_BNK, (0, -K % ALIGN, 0, -N % ALIGN))
    x_BRK = F.pad(x_BRK.float(), (0, -K % ALIGN))
    return torch.bmm(x_BRK, weight_BNK.transpose(1, 2))[..., :N]


def _fp8_product(x_BRK: Tensor, weight: Weight, expert_B: Tensor, _parts: int) -> Tensor:
    """Quantise the rows, and sum as fp8/ does: each 128 of K by itself at first."""
    assert weight.scales is not None
    (B, R, K), N = x_BRK.shape, weight.num_rows
    codes_XK, scales = quantise_ref(x_BRK.flatten(0, 1), weight.is_block)
    codes_BRK = codes_XK.float().view(B, R, K)
    data_BNK = weight.data.view(torch.uint8).index_select(0, expert_B).view(E4M3).float()
    of_w = weight.scales.index_select(0, expert_B)
    total_BRN = x_BRK.new_zeros(B, R, N, dtype=torch.float32)
    for g in range(num_groups(K)):
        columns = slice(g * GROUP, (g + 1) * GROUP)
        x, w = codes_BRK[..., columns], data_BNK[..., columns]
        x, w = F.pad(x, (0, -K % ALIGN)), F.pad(w, (0, -K % ALIGN, 0, -N % ALIGN))
        part_BRN = torch.bmm(x, w.transpose(1, 2))[..., :N]
        if weight.is_block:
            of_x = scales[g, : B * R].view(B, R, 1)
            part_BRN = part_BRN * (of_w[:, g, None] * of_x)
        total_BRN = total_BRN + part_BRN
    if weight.is_block:
        return total_BRN
    return total_BRN * scales.view(B, R, 1) * of_w[:, None]


def _of_experts(weight: Weight, expert_B: Tensor, parts: int) -> Tensor:
    """Gather the weights of some experts, in float32."""
    data = weight.data.index_select(0, expert_B)
    if weight.scales is None:
        return data.float()
    return dequantised_ref(data, weight.scales.index_select(0, expert_B), parts)
