"""Weights of four bits: from words and scales as weights/turned.py stores them to numbers.

A code s e e m, as the bits s00000000eem000000 of a bfloat16, is its number times 2^-126, subnormal
ones too. So two codes at a time are shifted to their places and multiplied by 2^(scale - 1), which
leaves the number times 2^(scale - 127) without a rounding (OCP Microscaling Formats 1.0, E2M1 and
E8M0). The scales are 2 to 128, which the loader checks.

A block of 64 rows and 64 columns is 128 places of four words, one for each thread of the four warps
that multiply it: place 32 w + 4 i + q has rows 16 w + 8 a + i in its words 2 a + c, and there the
columns 32 c + 16 j + 8 h + 2 q + l at the bits that weights/turned.py says. So wgmma takes the
numbers from the registers of the threads that loaded their codes.

Memory sets the pace of few rows only if a number costs few instructions: a word is some 13 for 8
numbers.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, tl

ROWS = 64  # of a block
CODES = 64  # of a row in a block
ROWS_OF_WORDS, WORDS = 16, 32  # of a block, as the copy engine takes it
SIGN = 0x80008000 - (1 << 32)  # of two bfloat16
CODE = 0x81C00000 - (1 << 32)  # of the upper one
SCALES = 4  # of a row in one word


@jit
def load_packed(
    words,  # [16 E G R, 32], blocks of 16 rows one after another, in tiles of those of a tile
    scales_ptr,  # [E, K / 128, PARTS N]
    expert,
    n0,
    N,
    K,
    i,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    dtype: tl.constexpr,
    IS_COMPILED: tl.constexpr,
):
    """Load BLOCK_N rows of each part and BLOCK_K columns: a tile [PARTS BLOCK_N, BLOCK_K].

    n0: its first row, a multiple of 64, of the N rows of each part. i: which of the tiles along K.
    Rows from N on and columns from 64 ceil(K / 64) on are any numbers.
    """
    GROUPS: tl.constexpr = BLOCK_K // 64
    BLOCKS: tl.constexpr = BLOCK_N // 64
    tl.static_assert(GROUPS <= 2)
    tl.static_assert(PARTS == 1 or BLOCKS == 1)  # as blocks lie
    num_groups = tl.cdiv(K, 64)
    group_blocks = PARTS * tl.cdiv(N, 64)
    g = i * GROUPS
    first = ((expert * num_groups + g) * group_blocks + PARTS * (n0 // 64)) * 16
    codes = words.load([first, 0])
    if GROUPS == 2:
        codes = tl.join(codes, words.load([first + group_blocks * 16, 0]))
    t = tl.arange(0, 128 * BLOCKS * PARTS)
    n = n0 + t // 128 % BLOCKS * 64 + t % 128 // 32 * 16 + t % 32 // 4
    rows = n[:, None] + 8 * tl.arange(0, 2)[None, :]
    rows = tl.minimum(rows, N - 1) + (t // (128 * BLOCKS) * N)[:, None]
    first_scale = (expert.to(tl.int64) * tl.cdiv(num_groups, 2) + g // 2) * (PARTS * N)
    scales = tl.load(scales_ptr + first_scale + rows)
    c = tl.arange(0, 2)[:, None]
    byte = c + 2 * (g % 2 + tl.arange(0, GROUPS))[None, :]
    codes = tl.reshape(codes, [128 * BLOCKS * PARTS, 4, GROUPS])
    powers = _powers(scales[:, :, None, None], byte[None, None, :, :], IS_COMPILED)
    return _tile(codes, tl.reshape(powers, codes.shape), IS_COMPILED).to(dtype)


@jit
def finished(x):
    """Return sums once they are there, and the registers that their products read may be written.

    Triton 3.6 has products run on while the next numbers are made. Those in shared memory lie in a
    ring, but those in registers do not: a product that is late then reads the next ones.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@jit
def _powers(scales, byte, IS_COMPILED: tl.constexpr):
    """Make 2^(scale - 1) of a byte of each word: twice in a word, or interpreted as float32."""
    if IS_COMPILED:
        twice = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;",
            "=r,r,r",
            [scales, byte * 0x0101 + 0x4040],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return twice * 0x80 + 0x3F003F00
    else:
        return ((((scales >> (8 * byte)) & 255) + 126) << 23).to(tl.float32, bitcast=True)


@jit
def _tile(words, powers, IS_COMPILED: tl.constexpr):
    """Make [64 B, 64 G] of words and powers [128 B, 4, G]; bfloat16, interpreted float32."""
    B: tl.constexpr = words.shape[0] // 128
    G: tl.constexpr = words.shape[2]
    parts = _numbers(words, powers) if IS_COMPILED else _interpreted(words, powers)
    low = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))  # l, h
    high = tl.join(tl.join(parts[4], parts[5]), tl.join(parts[6], parts[7]))
    # block, w, i, q, a, c, group, l, h, j
    joined = tl.reshape(tl.join(low, high), [B, 4, 8, 4, 2, 2, G, 2, 2, 2])
    ordered = tl.permute(joined, [0, 1, 4, 2, 6, 5, 9, 8, 3, 7])
    return tl.reshape(ordered, [B * 64, G * 64])


@jit
def _numbers(words, powers):
    """Return eight numbers of each word, in the order of j, h and l.

    GPUs before Hopper have no product of two bfloat16 pairs but this: -0 is added, which is exact.
    """
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 code, rest, zero;
            mov.b32 zero, 0x80008000;
            shl.b32 code, $8, 6;
            and.b32 code, code, 0x81C081C0;
            fma.rn.bf16x2 code, code, $9, zero;
            mov.b32 {$0, $1}, code;
            shl.b32 code, $8, 2;
            and.b32 code, code, 0x81C081C0;
            fma.rn.bf16x2 code, code, $9, zero;
            mov.b32 {$2, $3}, code;
            shf.r.wrap.b32 code, $8, $8, 4;
            and.b32 code, code, 0x81C081C0;
            fma.rn.bf16x2 code, code, $9, zero;
            mov.b32 {$4, $5}, code;
            shr.u32 rest, $8, 8;
            and.b32 rest, rest, 0x00400040;
            and.b32 code, $8, 0x81808180;
            or.b32 code, code, rest;
            fma.rn.bf16x2 code, code, $9, zero;
            mov.b32 {$6, $7}, code;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, powers],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@jit
def _interpreted(words, powers):
    first, second = words << 6, words << 2
    third = (words << 28) | ((words >> 4) & 0x0FFFFFFF)
    fourth = (words & 0x01800180) | ((words >> 8) & 0x00400040) | (words & -0x7FFF8000)
    return (
        _number(first << 16, powers),
        _number(first, powers),
        _number(second << 16, powers),
        _number(second, powers),
        _number(third << 16, powers),
        _number(third, powers),
        _number(fourth << 16, powers),
        _number(fourth, powers),
    )


@jit
def _number(bits, powers):
    """Multiply a code at its place in the upper half; all other bits may be anything."""
    return (bits & -0x7E400000).to(tl.float32, bitcast=True) * powers


def dequantised_ref(words: Tensor, scales_EHN: Tensor, parts: int) -> Tensor:
    """Make W [E, N, 64 G] of words [E, G, R, 128, 4] and scales [E, H, N], in float32.

    parts: of the rows, each of which has whole blocks
    """
    (E, G), N = words.shape[:2], scales_EHN.shape[2]
    third = words << 28 | words >> 4 & 0x0FFFFFFF
    fourth = words & 0x01800180 | words >> 8 & 0x00400040 | words & SIGN
    pairs = torch.stack([words << 6, words << 2, third, fourth], -1)
    bits = torch.stack([pairs << 16, pairs], -1) & CODE
    # of E, G, block, part, w, i, q, a, c, j, h, l
    bits = bits.view(E, G, -1, parts, 4, 8, 4, 2, 2, 2, 2, 2)
    ordered = bits.permute(0, 3, 2, 4, 7, 5, 1, 8, 9, 10, 6, 11)
    bits_EPNBX = ordered.reshape(E, parts, -1, 2 * G, 32)[:, :, : N // parts]
    scales_ENB = scales_EHN[..., None].view(torch.uint8).transpose(1, 2).reshape(E, N, -1)
    powers_ENB = (scales_ENB[..., : 2 * G].int() + 126 << 23).view(torch.float32)
    numbers_ENBX = bits_EPNBX.reshape(E, N, 2 * G, 32).view(torch.float32)
    return (numbers_ENBX * powers_ENB[..., None]).flatten(2)
