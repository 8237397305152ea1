"""Norms that leave codes: norms.py's, quantised in the kernel that makes them.

The codes are those of `quantise` on the rounded norm. The norm itself is written on request only.
"""

import torch
from torch import Tensor

from specdec.kernels import use_triton
from specdec.kernels.fp8.quantise import empty_codes, quantise_ref, room_for_codes
from specdec.kernels.fp8.weight import Fp8Rows
from specdec.kernels.linear import Sums
from specdec.kernels.norms import (
    add_rms_norm_ref,
    launch_add_rms_norm,
    launch_rms_norm,
    rms_norm_ref,
)
from specdec.kernels.opaque import opaque
from specdec.kernels.tiles import empty_rows


def fp8_rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, is_block: bool) -> Fp8Rows:
    """Norm rows [T, D] and quantise them. is_block: as `quantise` has it"""
    return Fp8Rows(*_fp8_rms_norm(x_TD, weight_D, eps, is_block))


@opaque(lambda x, weight, eps, is_block: empty_codes(x, is_block))
def _fp8_rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, is_block: bool
) -> tuple[Tensor, Tensor]:
    if not use_triton(x_TD):
        return quantise_ref(rms_norm_ref(x_TD, weight_D, eps), is_block)
    T, D = x_TD.shape
    rows = room_for_codes(T, D, is_block, x_TD.device)
    launch_rms_norm(*rows, x_TD, weight_D, eps)
    return rows


def fp8_add_rms_norm(
    x: Sums,
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    is_block: bool,
    tap_TD: Tensor | None = None,
    keeps_rows: bool = False,
) -> tuple[Fp8Rows, Tensor | None, Tensor]:
    """Norm x + residual and quantise it; the codes, the norm itself, and `add_rms_norm`'s stream.

    is_block:   as `quantise` has it
    keeps_rows: if not, the norm is not written, and None in its place
    The others: as `add_rms_norm` has them.
    """
    given = x, residual_TD, weight_D, eps, is_block, tap_TD, keeps_rows
    codes, scales, normed_TD, stream_TD = _fp8_add_rms_norm(*given)
    return Fp8Rows(codes, scales), normed_TD if keeps_rows else None, stream_TD


def _room(residual_TD: Tensor, is_kept: bool) -> Tensor:
    T, D = residual_TD.shape
    return empty_rows(residual_TD, T if is_kept else 0, D)


@opaque(
    lambda x, residual, weight, eps, is_block, tap, keeps_rows: (
        *empty_codes(residual, is_block),
        _room(residual, keeps_rows),
        torch.empty_like(residual),
    ),
    "tap_TD",
)
def _fp8_add_rms_norm(
    x: Sums,
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    is_block: bool,
    tap_TD: Tensor | None = None,
    keeps_rows: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normed_TD = _room(residual_TD, keeps_rows)
    if not use_triton(residual_TD):
        out_TD, stream_TD = add_rms_norm_ref(x, residual_TD, weight_D, eps, tap_TD)
        return *quantise_ref(out_TD, is_block), out_TD if keeps_rows else normed_TD, stream_TD
    T, D = residual_TD.shape
    rows = room_for_codes(T, D, is_block, residual_TD.device)
    kept = normed_TD if keeps_rows else None
    stream_TD = launch_add_rms_norm(*rows, x, residual_TD, weight_D, eps, tap_TD, kept)
    return *rows, normed_TD, stream_TD
