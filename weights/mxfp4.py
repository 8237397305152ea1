"""Which MXFP4 weights kernels can read, of what turned.py has made of them.

A number is its code times 2^(scale - 127). Its kernel makes it of two powers of 2, of which
2^(scale - 1) has to be a bfloat16, and the smallest number 2^(scale - 128), so the scales are 2 to
128; published ones are about 110 to 125.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from weights.errors import Problems
from weights.files.header import TensorEntry
from weights.turned import MAGNITUDES, NO_SCALE

LEAST, MOST = 2, 128
SCALES = "_scales"


def check_scales(
    tensors: dict[str, Tensor], held: Mapping[str, TensorEntry], problems: Problems
) -> None:
    """Refuse scales out of range, a line for each tensor; those of blocks of zeros become 127.

    tensors: arranged, among them words [E, G, R, 128, 4] and their scales [E, H, N], four in one
    """
    for name, packed in tensors.items():
        if not name.endswith(SCALES) or packed.dtype != torch.int32:
            continue
        scales = packed[..., None].view(torch.uint8)  # [E, H, N, 4]
        is_outside = (scales < LEAST) | (scales > MOST)
        if not bool(is_outside.any()):
            continue
        whole = name.removesuffix(SCALES)
        is_zero = _are_zeros(tensors[whole], scales, 2 if whole.endswith("gate_up_proj") else 1)
        scales[is_outside & is_zero] = NO_SCALE
        wrong = scales[is_outside & ~is_zero]
        if len(wrong):
            found = f"{len(wrong)}, the least {int(wrong.min())}, the greatest {int(wrong.max())}"
            line = f"has scales outside {LEAST} to {MOST}: {found}"
            problems.add(f"{held[name].where} {line}")


def _are_zeros(words: Tensor, scales_EHNX: Tensor, parts: int) -> Tensor:
    """Tell for each scale whether all of its numbers are 0. parts: of the rows; see turned.py"""
    (E, H, N, _), G = scales_EHNX.shape, words.shape[1]
    places = (words & MAGNITUDES == 0).view(E, G, -1, parts, 4, 8, 4, 2, 2)  # w, i, q, a, c
    rows = places.all(dim=6).transpose(2, 3).transpose(5, 6).flatten(3, 6)
    are_zero = rows[:, :, :, : N // parts].flatten(2, 3)
    is_zero = torch.ones(E, 2 * H, N, 2, dtype=torch.bool, device=words.device)
    is_zero[:, :G] = are_zero
    return is_zero.view(E, H, 2, N, 2).transpose(2, 3).reshape(E, H, N, 4)
