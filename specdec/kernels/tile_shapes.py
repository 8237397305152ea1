"""What a tile of a matrix product may be: its numbers, and what of them a GPU can run.

The bounds keep the bits: with 64 rows of W or more and whole warp groups, a row of x is always a
column of the same tensor-core instruction (linear.py), so tiles change the speed and nothing else.
"""

from bisect import bisect_left
from typing import Literal, NamedTuple, get_args

from specdec.kernels import next_power_of_2

Kind = Literal["split", "whole", "gate"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WIDE_DTYPES = ("bfloat16", "float16")
FP8 = "float8_e4m3fn"  # codes of either form of fp8/, which share tiles
TABLE_DTYPES = (*WIDE_DTYPES, FP8)  # tables know these; float32 has one set of tiles
ROW_CLASSES = (16, 32, 64, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 4096)
MANY_ROWS = ROW_CLASSES[-1]
PARALLEL_ROWS = 512  # with more rows a program walks all splits itself, and leaves one part
PERSISTENT_ROWS = 160  # persistent/ serves classes from here on
PERSISTENT_ROWS_FP8 = 128  # and these of 8-bit numbers
PARTS = (1, 2, 4)  # of K, as programs for few rows leave them
SHARED_MEMORY = 227 * 1024  # of one multiprocessor
ALLOWED = {
    "block_n": (64, 128, 192, 256),
    "block_m": (16, 32, 48, 64, 96, 128, 160, 192, 256),
    "block_k": (32, 64, 128, 256),  # where there are splits, a divisor of one
    "num_stages": (2, 3, 4, 5, 6, 7, 8, 12, 16),
    "num_warps": (4, 8),
    "cuts": (0, 1, 2, 4),
}
ROW_BYTES = 128  # of a tile's row, in persistent/ and of 8-bit numbers everywhere
SCALE_BYTES = 4  # of a row of 8-bit numbers; a tile has those of a power of two of rows
LEAST_SCALES = 32  # that the copy engine brings at a time: a tile in shared memory has 128 bytes
THREE_GROUPS = 192  # block_n, of persistent/ alone
MOST_ROWS_FP8 = 128  # of a product's accumulators, beside which are the sums
TURNS = 256  # block_m of gate with two groups there, with 8 gate and 8 up rows of W in turn
PERSISTENT_BYTES = 33 * 1024  # of shared memory beside its ring: results, and barriers
GATED_BYTES = 17 * 1024  # of 8-bit gate, whose results have 16 bits or smaller blocks
THREE_GROUPS_BYTES = 25 * 1024  # with three groups, whose results have smaller blocks


class Product(NamedTuple):
    """x W^T by what it leaves and the weight's shape [N, K]; gate: N counts both halves."""

    kind: Kind  # split: sums for a reader; whole: finished; gate: SwiGLU
    N: int
    K: int
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.kind} {self.N}x{self.K}"


class Shape(NamedTuple):
    """The tiles for one class of row counts, in the order of a table's lists."""

    block_n: int
    block_m: int  # a power of two, or with a second one after it: see row_pieces
    block_k: int
    num_stages: int
    num_warps: int
    cuts: int = 0  # 0: a program for each tile; else persistent/, its last tiles cut


def row_class(M: int) -> int:
    """Find the first of ROW_CLASSES that is no smaller, or the last: its rows share tiles."""
    return ROW_CLASSES[min(bisect_left(ROW_CLASSES, M), len(ROW_CLASSES) - 1)]


def rows_of_tiles(M: int) -> int:
    """Count the rows that whole tiles have for M rows of x, whatever the tiles."""
    if M <= 256:
        return row_class(M)
    # multiples of the tiles of more rows, which are 128, 192 and 256 high
    step = 128 if M <= PARALLEL_ROWS else 768
    return -(-M // step) * step


def row_pieces(block_m: int) -> tuple[int, int]:
    """Cut a tile's rows into powers of two, as kernels take them: 160 into 128 + 32."""
    whole = 1 << (block_m.bit_length() - 1)
    return whole, block_m - whole


def takes_turns(kind: Kind, block_n: int, block_m: int, cuts: int) -> bool:
    """Whether 8 gate and 8 up rows of W take turns in a tile, and one product has both."""
    return kind == "gate" and cuts != 0 and (block_n == THREE_GROUPS or block_m == TURNS)


def rows_of_w(kind: Kind, shape: Shape) -> int:
    """Count a tile's rows of W, gate and up rows together."""
    has_turns = takes_turns(kind, shape.block_n, shape.block_m, shape.cuts)
    return shape.block_n * (2 if kind == "gate" and not has_turns else 1)


def size_of(dtype: str) -> int:
    """Count the bytes of a number in a tile: 16 bits, or 8."""
    return 1 if dtype == FP8 else 2


def rows_at_once(dtype: str, block_m: int) -> tuple[int, int]:
    """Cut a tile's rows as persistent/ multiplies them: those of 8 bits in pieces of up to 128."""
    if dtype == FP8 and block_m > MOST_ROWS_FP8:
        return MOST_ROWS_FP8, block_m - MOST_ROWS_FP8
    return row_pieces(block_m)


def bytes_of(product: Product, shape: Shape) -> int:
    """Count the shared memory of a program's tiles."""
    is_fp8 = product.dtype == FP8
    rows = rows_of_w(product.kind, shape) + shape.block_m
    stage = rows * shape.block_k * size_of(product.dtype)
    if is_fp8:
        of_w = next_power_of_2(shape.block_n) * (2 if product.kind == "gate" else 1)
        stage += SCALE_BYTES * (of_w + max(next_power_of_2(shape.block_m), LEAST_SCALES))
    beside = THREE_GROUPS_BYTES if shape.block_n == THREE_GROUPS else PERSISTENT_BYTES
    if is_fp8 and product.kind == "gate":
        beside = GATED_BYTES
    return stage * shape.num_stages + (beside if shape.cuts else 0)


def problem_of(product: Product, rows: int, shape: Shape) -> str | None:
    """Say why these tiles cannot serve a class of rows, or None."""
    for (name, values), value in zip(ALLOWED.items(), shape, strict=True):
        if value not in values:
            return f"{name} {value}, allowed are {', '.join(map(str, values))}"
    if shape.cuts != 0:
        problem = _persistent_problem(product, rows, shape)
        if problem is not None:
            return problem
    elif shape.block_n == THREE_GROUPS:
        return f"block_n {THREE_GROUPS} is for cuts"
    elif row_pieces(shape.block_m)[1] and (rows > PARALLEL_ROWS or product.dtype == FP8):
        return f"block_m {shape.block_m}, a power of two is needed for {rows} rows"
    if product.dtype == FP8 and shape.block_k != ROW_BYTES:
        return f"block_k {shape.block_k}, {ROW_BYTES} is needed for {FP8}"
    size = bytes_of(product, shape)
    if size > SHARED_MEMORY:
        return f"{size:,} bytes of shared memory, of {SHARED_MEMORY:,}"
    return None


def _persistent_problem(product: Product, rows: int, shape: Shape) -> str | None:
    block_n, block_m, block_k, _, num_warps, cuts = shape
    is_fp8 = product.dtype == FP8
    least = PERSISTENT_ROWS_FP8 if is_fp8 else PERSISTENT_ROWS
    if product.kind == "whole" or rows < least or product.N % 16 != 0:
        wanted = f"split and gate, N a multiple of 16, from {least} rows on"
        return f"cuts {cuts} is for {wanted}"
    needed_k = ROW_BYTES // size_of(product.dtype)
    has_blocks = block_n in (128, THREE_GROUPS) and block_m >= 64
    if not has_blocks or (block_k, num_warps) != (needed_k, 4):
        needed = f"block_k {needed_k}, num_warps 4"
        return f"cuts {cuts} needs block_n 128 or {THREE_GROUPS}, {needed} and block_m 64 or more"
    if block_n == THREE_GROUPS and block_m > 128:
        return f"block_n {THREE_GROUPS} is for block_m up to 128"
    if is_fp8 and product.kind == "gate" and (block_n, block_m) > (128, MOST_ROWS_FP8):
        return f"cuts {cuts}: gate of {FP8} takes block_n 128 and block_m up to {MOST_ROWS_FP8}"
    if cuts > 1 and rows_at_once(product.dtype, block_m)[1]:
        return f"cuts {cuts}: block_m {block_m} takes 1"
    if cuts > 1 and block_m // cuts < 32:
        return f"cuts {cuts} leaves {block_m // cuts} rows of block_m {block_m}, 32 are needed"
    return None
