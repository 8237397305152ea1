"""The order of a product's sum over K: where it is cut into splits, and how these are added.

There are S splits of K / S columns each, S a power of two and K / S a multiple of 64, of 128 if
weights have 8 bits. Their sums are added in pairs of neighbours, ((0 + 1) + (2 + 3)), by whatever
adds them: a program that makes several, the reader of `Sums`, a twin. So S / n neighbours may be
added anywhere, one GPU of n for example, and the rest elsewhere: the bits are the same. A router
whose K takes no such S has an odd one: the first half is one longer, ((0 + 1) + 2).

S follows from the shape of the whole weight alone. Tables, GPUs, dtypes and the number of rows
decide who makes how many splits, and never how they are added.
"""

from typing import NamedTuple

from torch import Tensor

from specdec.kernels import HAS_TRITON, INTERPRET, jit, tl

Whole = tuple[int, int]  # the shape [N, K] of the weight of which another is a part
SPLITS = (2, 4)  # allowed numbers beside 1, and so the numbers of GPUs with equal bits
SPLITS_FP8 = (2,)  # whose sums take as many registers again, for each 128 of K
UNIT = 64  # of K: a split is some of these, so that tiles of 32 and 64 columns always fit
UNIT_FP8 = 128
LEAST_K = 512  # of a split of qkv
MOST_PROGRAMS = 160  # of qkv's splits, 64 rows of W each: a few more than multiprocessors
IS_COMPILED = tl.constexpr(not INTERPRET) if HAS_TRITON else None
ADD = tl.constexpr("add.rn.f32 $0, $1, $2;") if HAS_TRITON else None


class Order(NamedTuple):
    """How a product is summed, and what it leaves to its reader."""

    splits: int
    parts: int  # left by programs that add splits / parts neighbours each

    @property
    def walked(self) -> int:
        """Count the splits that a program adds."""
        return self.splits // self.parts


def splits_of(N: int, K: int, is_fp8: bool = False) -> int:
    """Count the splits of a product with the whole weight [N, K].

    o and down, whose columns go to several GPUs, have no more than 1.25 rows for a column: they
    take as many splits as K allows. qkv has more, and its rows go to the GPUs: it is split only
    where its rows alone would leave multiprocessors idle.
    """
    counts, unit = (SPLITS_FP8, UNIT_FP8) if is_fp8 else (SPLITS, UNIT)
    fitting = [n for n in counts if K % (unit * n) == 0]
    if 4 * N > 5 * K:
        fitting = [n for n in fitting if K // n >= LEAST_K and N // 64 * n <= MOST_PROGRAMS]
    return max(fitting, default=1)


def splits_of_part(N: int, K: int, whole: Whole | None, is_fp8: bool = False) -> int:
    """Count the splits of a weight [N, K] that is some rows, or neighbouring columns, of another.

    whole: the other's shape; None: the weight is whole. A part with less than one split has one,
    whose bits are its own.
    """
    if whole is None:
        return splits_of(N, K, is_fp8)
    return max(splits_of(*whole, is_fp8) * K // whole[1], 1)


def add_parts(parts_STN: Tensor) -> Tensor:
    """Add [S, T, N] to [T, N] as every reader does."""
    S = len(parts_STN)
    if S == 1:
        return parts_STN[0]
    half = (S + 1) // 2
    return add_parts(parts_STN[:half]) + add_parts(parts_STN[half:])


@jit
def added(ptr, first, T, width, column, mask, other, COUNT: tl.constexpr):
    """Load one row of COUNT neighbouring parts [T, width] and add them.

    first: the row, from the first part on. mask, other: of the columns, as tl.load has them
    """
    if COUNT == 1:
        return tl.load(ptr + first * width + column, mask, other)
    else:
        HALF: tl.constexpr = (COUNT + 1) // 2
        low = added(ptr, first, T, width, column, mask, other, HALF)
        high = added(ptr, first + HALF * T, T, width, column, mask, other, COUNT - HALF)
        return low + high


@jit
def add_now(low, high):
    """Add float32 tiles here. Left to compilers, both are held in registers until the sum is read.

    Where these are too few, tensor cores wait after each instruction.
    """
    if IS_COMPILED:
        return tl.inline_asm_elementwise(
            ADD, "=f,f,f", [low, high], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        return low + high


@jit
def split_blocks(K, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):
    """Count the blocks of K in a split, which are whole where there are several splits."""
    return tl.cdiv(K // SPLITS, BLOCK_K)
