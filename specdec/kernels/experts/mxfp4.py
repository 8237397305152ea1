"""Weights of four bits: from words and scales as weights/turned.py stores them to numbers.

A code s e e m, as the bits s00000000eem000000 of a bfloat16, is its number times 2^-126, subnormal
ones too. So two codes at a time are shifted to their places and multiplied by 2^(scale - 1), which
leaves the number times 2^(scale - 127) without a rounding (OCP Microscaling Formats 1.0, E2M1 and
E8M0). The scales are 2 to 128, which the loader checks.

Bits 16 l + 8 j + 4 h on of word 2 q + c are column 32 c + 16 j + 8 h + 2 q + l of 64: those of one
thread of the left operand of wgmma are two neighbouring words, so that registers need no exchange.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, tl

CODES = 64  # of a row in eight words
SCALES = 4  # of a row in one word


@jit
def load_packed(
    words_ptr,
    scales_ptr,
    expert,
    first,
    last,
    num_n,
    K,
    i,
    dtype: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_COMPILED: tl.constexpr,
):
    """Load rows of MXFP4 from `first` to `last`, and columns of step i, and make numbers of them.

    Rows after the last and groups of 64 columns after K are zeros.
    """
    GROUPS: tl.constexpr = BLOCK_K // 64
    num_groups = tl.cdiv(K, 64)
    n = first + tl.arange(0, BLOCK_N)
    g = tl.arange(0, GROUPS)
    x = tl.arange(0, 8)
    inside = n < last
    at_group = expert.to(tl.int64) * num_groups + i * GROUPS
    words_at = words_ptr + at_group * num_n * 8
    at = (g[None, :, None] * num_n + n[:, None, None]) * 8 + x[None, None, :]
    are_inside = inside[:, None, None]
    if not IS_WHOLE:
        are_inside = are_inside & (i * GROUPS + g < num_groups)[None, :, None]
    words = tl.load(words_at + at, mask=are_inside, other=0)
    tl.static_assert(GROUPS <= 2)
    at_word = expert.to(tl.int64) * tl.cdiv(num_groups, 2) + i * GROUPS // 2
    scales = tl.load(scales_ptr + at_word * num_n + n, mask=inside, other=0)
    bit = (i * GROUPS % 2 + g)[:, None] * 16 + (x % 2)[None, :] * 8
    scales = (scales[:, None, None] >> bit[None, :, :]) & 255
    return dequantised(words, scales, IS_COMPILED).to(dtype)


@jit
def dequantised(words, scales, IS_COMPILED: tl.constexpr):
    """Make [N, 64 G] of words [N, G, 8] and scales [N, G, 8]; bfloat16, interpreted float32."""
    N: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    if IS_COMPILED:
        power = scales * 0x00800080 + 0x3F003F00  # 2^(scale - 1) twice
        parts = _numbers(words, power)
    else:
        power = ((scales + 126) << 23).to(tl.float32, bitcast=True)
        parts = _interpreted(words, power)
    low = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))  # l, h
    high = tl.join(tl.join(parts[4], parts[5]), tl.join(parts[6], parts[7]))
    joined = tl.reshape(tl.join(low, high), [N, G, 4, 2, 2, 2, 2])  # q, c, l, h, j
    return tl.reshape(tl.permute(joined, [0, 1, 3, 6, 5, 2, 4]), [N, G * 64])


@jit
def _numbers(words, power):
    """Return eight numbers of each word, in the order of their bits' j, h and l.

    GPUs before Hopper have no product of two bfloat16 pairs but this: -0 is added, which is exact.
    """
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 sign, code, zero;
            mov.b32 zero, 0x80008000;
            shl.b32 sign, $8, 12;
            shl.b32 code, $8, 6;
            and.b32 sign, sign, 0x80008000;
            and.b32 code, code, 0x01C001C0;
            or.b32 code, code, sign;
            fma.rn.bf16x2 code, code, $9, zero;
            mov.b32 {$0, $1}, code;
            shl.b32 sign, $8, 8;
            shl.b32 code, $8, 2;
            and.b32 sign, sign, 0x80008000;
            and.b32 code, code, 0x01C001C0;
            or.b32 code, code, sign;
            fma.rn.bf16x2 code, code, $9, zero;
            mov.b32 {$2, $3}, code;
            shl.b32 sign, $8, 4;
            shr.b32 code, $8, 2;
            and.b32 sign, sign, 0x80008000;
            and.b32 code, code, 0x01C001C0;
            or.b32 code, code, sign;
            fma.rn.bf16x2 code, code, $9, zero;
            mov.b32 {$4, $5}, code;
            shr.b32 code, $8, 6;
            and.b32 sign, $8, 0x80008000;
            and.b32 code, code, 0x01C001C0;
            or.b32 code, code, sign;
            fma.rn.bf16x2 code, code, $9, zero;
            mov.b32 {$6, $7}, code;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, power],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@jit
def _interpreted(words, power):
    return (
        _number(words, power, 0),
        _number(words, power, 16),
        _number(words, power, 4),
        _number(words, power, 20),
        _number(words, power, 8),
        _number(words, power, 24),
        _number(words, power, 12),
        _number(words, power, 28),
    )


@jit
def _number(words, power, BIT: tl.constexpr):
    code = words >> BIT
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * power


def dequantised_ref(words_EGNX: Tensor, scales_EHN: Tensor) -> Tensor:
    """Make W [E, N, 64 G] of words [E, G, N, 8] and scales [E, H, N], in float32."""
    E, G, N, _ = words_EGNX.shape
    bit = torch.arange(0, 32, 4, dtype=torch.int32, device=words_EGNX.device)  # 16 l + 8 j + 4 h
    codes = words_EGNX.view(E, G, N, 4, 2, 1) >> bit
    bits = ((codes & 8) << 28 | (codes & 7) << 22).view(E, G, N, 4, 2, 2, 2, 2)  # q, c, l, j, h
    bits_ENBX = bits.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(E, N, 2 * G, 32)
    scales_ENB = scales_EHN[..., None].view(torch.uint8).transpose(1, 2).reshape(E, N, -1)
    powers_ENB = (scales_ENB[..., : 2 * G].int() + 126 << 23).view(torch.float32)
    return (bits_ENBX.view(torch.float32) * powers_ENB[..., None]).flatten(2)
