"""Weights of four bits: from words and scales as weights/turned.py stores them to numbers.

A code s e e m, as the bits s00000000eem000000 of a bfloat16, is its number times 2^-126, subnormal
ones too. So two codes at a time are shifted to their places and multiplied by 2^(scale - 1), which
leaves the number times 2^(scale - 127) without a rounding (OCP Microscaling Formats 1.0, E2M1 and
E8M0). The scales are 2 to 128, which the loader checks.

A block of 64 rows and 64 columns is 128 places of four words, one for each thread of the four warps
that multiply it: place 32 w + 4 i + q has rows 16 w + 8 a + i in its words 2 a + c, and there the
columns 32 c + 16 j + 8 h + 2 q + l from bit 16 l + 8 j + 4 h on. So wgmma takes the numbers from
the registers of the threads that loaded their codes.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, tl

ROWS = 64  # of a block
CODES = 64  # of a row in a block
SCALES = 4  # of a row in one word


@jit
def load_packed(
    words_ptr,  # [E, K / 64, PARTS blocks of N, 128, 4]
    scales_ptr,  # [E, K / 128, PARTS N]
    expert,
    n0,
    N,
    K,
    i,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    dtype: tl.constexpr,
    IS_COMPILED: tl.constexpr,
):
    """Load a tile [BLOCK_N, BLOCK_K] of a part of the rows, of which each has N.

    n0: its first row, a multiple of 64. i: which of the tiles along K. Rows from N on and groups of
    columns from K on are zeros.
    """
    GROUPS: tl.constexpr = BLOCK_K // 64
    PLACES: tl.constexpr = BLOCK_N * 2
    tl.static_assert(GROUPS <= 2)
    num_groups = tl.cdiv(K, 64)
    num_blocks = tl.cdiv(N, 64)
    g = i * GROUPS
    t = tl.arange(0, PLACES)
    block = n0 // 64
    first = (expert.to(tl.int64) * num_groups * PARTS + PART) * num_blocks + block
    at = words_ptr + first * 512 + (g * (PARTS * num_blocks) * 512 + t * 4)[:, None]
    at += tl.arange(0, 4)[None, :]
    inside = (block + t // 128 < num_blocks)[:, None]
    words = tl.load(at, mask=inside & (g < num_groups), other=0)
    if GROUPS == 2:
        at += PARTS * num_blocks * 512
        words = tl.join(words, tl.load(at, mask=inside & (g + 1 < num_groups), other=0))
    n = n0 + t // 128 * 64 + t % 128 // 32 * 16 + t % 32 // 4
    rows = n[:, None] + 8 * tl.arange(0, 2)[None, :]
    first_scale = (expert.to(tl.int64) * tl.cdiv(num_groups, 2) + g // 2) * PARTS + PART
    scales = tl.load(scales_ptr + first_scale * N + rows, mask=rows < N, other=0)
    bit = 8 * tl.arange(0, 2)[:, None] + 16 * (g % 2 + tl.arange(0, GROUPS))[None, :]
    scales = (scales[:, :, None, None] >> bit[None, None, :, :]) & 255
    words = tl.reshape(words, [PLACES, 4, GROUPS])
    return _tile(words, tl.reshape(scales, [PLACES, 4, GROUPS]), IS_COMPILED).to(dtype)


@jit
def _tile(words, scales, IS_COMPILED: tl.constexpr):
    """Make [64 B, 64 G] of words and scales [128 B, 4, G]; bfloat16, interpreted float32."""
    B: tl.constexpr = words.shape[0] // 128
    G: tl.constexpr = words.shape[2]
    if IS_COMPILED:
        power = scales * 0x00800080 + 0x3F003F00  # 2^(scale - 1) twice
        parts = _numbers(words, power)
    else:
        power = ((scales + 126) << 23).to(tl.float32, bitcast=True)
        parts = _interpreted(words, power)
    low = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))  # l, h
    high = tl.join(tl.join(parts[4], parts[5]), tl.join(parts[6], parts[7]))
    # block, w, i, q, a, c, group, l, h, j
    joined = tl.reshape(tl.join(low, high), [B, 4, 8, 4, 2, 2, G, 2, 2, 2])
    ordered = tl.permute(joined, [0, 1, 4, 2, 6, 5, 9, 8, 3, 7])
    return tl.reshape(ordered, [B * 64, G * 64])


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


def dequantised_ref(words: Tensor, scales_EHN: Tensor, parts: int) -> Tensor:
    """Make W [E, N, 64 G] of words [E, G, R, 128, 4] and scales [E, H, N], in float32.

    parts: of the rows, each of which has whole blocks
    """
    (E, G), N = words.shape[:2], scales_EHN.shape[2]
    bit = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)  # 16 l + 8 j + 4 h
    codes = words.view(E, G, parts, -1, 4, 8, 4, 2, 2, 1) >> bit
    bits = (((codes & 8) << 28) | ((codes & 7) << 22)).view(E, G, parts, -1, 4, 8, 4, 2, 2, 2, 2, 2)
    # of G, part, block, w, i, q, a, c, l, j, h
    ordered = bits.permute(0, 2, 3, 4, 7, 5, 1, 8, 10, 11, 6, 9)
    bits_EPNBX = ordered.reshape(E, parts, -1, 2 * G, 32)[:, :, : N // parts]
    scales_ENB = scales_EHN[..., None].view(torch.uint8).transpose(1, 2).reshape(E, N, -1)
    powers_ENB = (scales_ENB[..., : 2 * G].int() + 126 << 23).view(torch.float32)
    numbers_ENBX = bits_EPNBX.reshape(E, N, 2 * G, 32).view(torch.float32)
    return (numbers_ENBX * powers_ENB[..., None]).flatten(2)
