"""Tiles of products that no table knows: the cheapest of a few candidates by a model of the GPU.

The candidates are what won somewhere in a measured table, and their neighbours; `specdec tune`
measures the same ones. The model counts clocks of the busiest multiprocessor. Its programs share
the loads and the tensor cores, and run in turns of as many as fit side by side; a program alone
waits for its first tiles, for each step, and for memory wherever its buffers are shallow.
"""

from itertools import product as pairs

from specdec.kernels.sum_order import Order
from specdec.kernels.tile_shapes import (
    FP8,
    PARALLEL_ROWS,
    PARTS,
    ROW_BYTES,
    SHARED_MEMORY,
    THREE_GROUPS,
    Product,
    Shape,
    bytes_of,
    problem_of,
    rows_at_once,
    rows_of_w,
    size_of,
)

FEW = (  # block_n, block_k, num_stages, num_warps; one tile holds all rows
    *pairs((64,), (256,), (3, 4, 5), (4,)),
    *pairs((64,), (128,), (3, 4, 5, 6), (4,)),
    *pairs((64,), (64,), (3, 6), (4,)),
    (128, 256, 3, 4),
    *pairs((128,), (128,), (3, 4), (4,)),
    (128, 128, 4, 8),
    *pairs((128,), (64,), (3, 5), (4,)),
)
MEDIUM = (  # block_n, block_m, block_k, num_stages, num_warps
    (64, 64, 128, 6, 4),
    *pairs((64,), (128,), (64,), (3, 5), (4,)),
    (64, 128, 128, 4, 4),
    *pairs((64,), (160,), (64,), (3, 6), (4,)),
    (64, 192, 64, 6, 4),
    *((64, 256, 64, 4, 8), (64, 256, 64, 5, 4)),
    *pairs((128,), (64,), (64, 128), (4,), (4,)),
    (128, 96, 64, 4, 4),
    *((128, 128, 64, 3, 4), (128, 128, 64, 4, 8), (128, 128, 64, 6, 4)),
    (128, 160, 64, 4, 4),
    *pairs((128,), (192, 256), (64,), (4,), (8,)),
    (256, 64, 64, 4, 4),
    *pairs((256,), (128, 160), (64,), (4,), (8,)),
)
MANY = (  # as MEDIUM
    *((64, 64, 64, 4, 4), (64, 128, 64, 4, 8), (64, 256, 64, 4, 8)),
    *pairs((128,), (128,), (64,), (3, 4), (4, 8)),
    *pairs((128,), (128,), (128,), (3,), (4, 8)),
    *((128, 256, 64, 4, 8), (256, 128, 64, 4, 8)),
)
FEW_FP8 = (6, 8, 12, 16)  # num_stages; 64 rows of W and 128 of K, which spread a weight evenly
WIDE_FP8 = (  # block_n, block_m, num_stages, num_warps; for more rows than FEW_FP8
    *((64, 64, 6, 4), (64, 128, 4, 4), (64, 128, 6, 4)),
    *((128, 64, 4, 8), (128, 64, 6, 8), (128, 128, 4, 8), (128, 128, 3, 8)),
)
PERSISTENT_FP8 = (  # as PERSISTENT
    *((128, 64, stages, 1) for stages in (4, 6, 7)),
    *((128, 96, stages, 1) for stages in (4, 6)),
    *((128, 128, stages, cuts) for stages in (3, 4, 5) for cuts in (1, 2, 4)),
    *((128, block_m, stages, 1) for block_m in (160, 192, 256) for stages in (3, 4, 5)),
    *((THREE_GROUPS, block_m, stages, 1) for block_m in (64, 96, 128) for stages in (4, 5, 6)),
)
PERSISTENT = (  # on Hopper GPUs, for split and gate: block_n, block_m, num_stages and cuts
    *((128, 64, stages, 1) for stages in (5, 8)),
    *((128, 96, stages, 1) for stages in (4, 6)),
    *((128, 128, stages, cuts) for stages in (4, 6) for cuts in (1, 2, 4)),
    *((128, 160, stages, 1) for stages in (3, 4)),
    *((128, 192, stages, 1) for stages in (3, 4)),
    *((128, 256, 4, cuts) for cuts in (1, 2)),
    (THREE_GROUPS, 96, 5, 1),
    *((THREE_GROUPS, 128, 5, cuts) for cuts in (1, 2)),
)
MOST_SUMS = (160, 200)  # registers of a thread; persistent/ leaves its multiplying warps 232
MOST_WAITING = (200, 144)  # of sums and those that wait for them; the second with three groups
# of an H100 or H200; the clocks agree best with the table that was measured on an H200
MULTIPROCESSORS = 132
REGISTERS = 65536
LOADED = 54  # bytes that a multiprocessor loads in a clock
TENSOR_RATE = 0.7  # of the tensor cores' rate that is reached
LATENCY = 2600  # clocks from a request to its tile, all multiprocessors loading
STEP = 30  # clocks of a program's step besides its loads and products
OUTSIDE = 1.5  # how much longer a tile takes that lies partly outside of x
START = 220  # clocks of a program before its first product and after its last


def rule_parts(N: int, K: int) -> int:
    """Take as many parts as multiprocessors run at a time, with at least 1,024 of K in each."""
    fitting = (n for n in PARTS if K // n >= 1024 and N // 64 * n <= MULTIPROCESSORS)
    return max(fitting, default=1)


def rule_shape(product: Product, rows: int, order: Order, has_wgmma: bool = False) -> Shape:
    """rows: a row class. order: of that class."""
    if product.dtype == "float32":
        return Shape(64, min(64, rows), 32, 3, 4)
    shapes = candidates(product, rows, order, has_wgmma)
    return min(shapes, key=lambda shape: clocks(product, rows, order, shape))


def candidates(product: Product, rows: int, order: Order, has_wgmma: bool = False) -> list[Shape]:
    """List what may be fastest, at most 24, if it fits shared memory, and nearly registers."""
    if product.dtype == FP8:
        shapes = _of_fp8(rows)
    elif rows > PARALLEL_ROWS:
        shapes = [Shape(*numbers) for numbers in MANY]
    elif rows > 64:
        shapes = [Shape(n, m, *rest) for n, m, *rest in MEDIUM if rows % m == 0 or m == 128]
    else:
        shapes = [Shape(n, rows, *rest) for n, *rest in FEW]
    if has_wgmma:
        shapes += _persistent(product, rows, order)
    return [
        s
        for s in shapes
        if problem_of(product, rows, s) is None
        and sums_held(product, s) <= MOST_SUMS[s.cuts != 0]
        and suits(product, s, order)
    ]


def _of_fp8(rows: int) -> list[Shape]:
    if rows <= 64:
        return [Shape(64, rows, ROW_BYTES, stages, 4) for stages in FEW_FP8]
    return [Shape(n, m, ROW_BYTES, *rest) for n, m, *rest in WIDE_FP8]


def suits(product: Product, shape: Shape, order: Order) -> bool:
    """Whether blocks fill a split, and registers hold the sums that wait for their neighbours."""
    if order.splits == 1:
        return True
    is_filled = product.K // order.splits % shape.block_k == 0
    if order.walked == 1:
        return is_filled
    most = MOST_WAITING[shape.block_n == THREE_GROUPS]
    return is_filled and sums_held(product, shape, order.walked) <= most


def sums_held(product: Product, shape: Shape, walked: int = 1) -> int:
    """Count a thread's registers for sums, with those of splits that wait for their neighbours.

    8-bit products have accumulators of 128 of K beside the sums: of one piece of the rows, and one
    of gate and up rows, at a time; in the kernel with a program for each tile of all.
    """
    sums = _accumulators(product, shape)
    held = sums * walked.bit_length()
    if product.dtype != FP8:
        return held
    pieces = 2 if product.kind == "gate" else 1
    rows = rows_at_once(product.dtype, shape.block_m)[0]
    return held + (sums * rows // shape.block_m // pieces if shape.cuts else sums)


def _persistent(product: Product, rows: int, order: Order) -> list[Shape]:
    """List the deepest ring that fits, tiles that the rows fill, and cuts that do anything."""
    is_fp8 = product.dtype == FP8
    block_k = ROW_BYTES // size_of(product.dtype)
    listed = PERSISTENT_FP8 if is_fp8 else PERSISTENT
    shapes = (Shape(n, m, block_k, stages, 4, cuts) for n, m, stages, cuts in listed)
    fitting = [s for s in shapes if problem_of(product, rows, s) is None]
    deepest = {s[:2] + s[5:]: s for s in sorted(fitting, key=lambda s: s.num_stages)}.values()
    found = []
    for s in deepest:
        # seven eighths of the largest tiles are enough; 128 rows always are
        is_most = s.block_m == 256 and 8 * rows >= 7 * -(-rows // 256) * 256
        is_filled = rows % s.block_m == 0 or s.block_m == 128 or is_most
        num_whole, num_parts = _whole_and_parts(product, rows, order.parts, s)
        cuts_any = rows <= 1024 and num_whole >= MULTIPROCESSORS and num_parts > 0
        is_many = rows > PARALLEL_ROWS and s.block_m % 5 != 0
        if (is_filled or is_many) and (s.cuts == 1 or cuts_any):
            found.append(s)
    return found


def measured_rows(rows: int) -> int:
    """Choose the rows that stand for a class."""
    return 8 if rows == 16 else rows  # few requests matter most


def clocks(product: Product, rows: int, order: Order, shape: Shape) -> float:
    """Estimate clocks of the busiest multiprocessor."""
    parts = order.parts
    K = product.K / parts
    height = rows_of_w(product.kind, shape)
    items = _num_items(product, rows, parts, shape)
    busy = _busy(product, height, shape.block_m, K)
    if not shape.cuts:
        programs = -(-items // MULTIPROCESSORS)
        steps = K / shape.block_k
        alone = START + max(busy + steps * STEP, steps * LATENCY / (shape.num_stages - 1))
        turns = -(-programs // min(programs, _resident(product, shape)))
        is_filled = rows % shape.block_m == 0 or rows > PARALLEL_ROWS
        return max(programs * busy, turns * alone) * (1.0 if is_filled else OUTSIDE)
    if items <= MULTIPROCESSORS:  # a first turn is never cut
        return busy + START
    num_whole, num_parts = _whole_and_parts(product, rows, parts, shape)
    part = _busy(product, height, shape.block_m // shape.cuts, K) + START
    turns = num_whole // MULTIPROCESSORS
    return turns * (busy + START) + -(-num_parts // MULTIPROCESSORS) * part


def _num_items(product: Product, rows: int, parts: int, shape: Shape) -> int:
    """Count tiles, each part of K apart."""
    height = rows_of_w(product.kind, shape)
    return -(-product.N // height) * -(-measured_rows(rows) // shape.block_m) * parts


def _whole_and_parts(product: Product, rows: int, parts: int, shape: Shape) -> tuple[int, int]:
    """Count items made whole in turns of all programs, and parts of the others: items.py's."""
    cuts = max(shape.cuts, 1)
    of_x = -(-rows * cuts // shape.block_m)
    of_w = _num_items(product, rows, parts, shape) // -(-of_x // cuts)
    whole = of_w * (of_x // cuts)
    left = whole % MULTIPROCESSORS
    return whole - left, left * cuts + of_w * (of_x % cuts)


def _busy(product: Product, height: int, block_m: int, K: float) -> float:
    """Count clocks of one tile's loads or products, whichever is more."""
    size = size_of(product.dtype)
    loads = (height + block_m) * K * size / LOADED
    # 64 x 32 bytes of W against m columns take m / 2 clocks, or what reading both from shared
    # memory does; sums of 128 columns are added by others meanwhile
    instructions = height / 64 * K * size / 32
    columns = rows_at_once(product.dtype, block_m)
    dots = instructions * sum(max(m / 2, 16 + m / 4) for m in columns if m > 0) / TENSOR_RATE
    return max(loads, dots)


def _resident(product: Product, shape: Shape) -> int:
    """Count programs that fit into a multiprocessor side by side."""
    registers = shape.num_warps * 32 * (sums_held(product, shape) + 70)
    by_memory = SHARED_MEMORY // (bytes_of(product, shape) + 2048)
    return max(1, min(by_memory, REGISTERS // registers, 4))


def _accumulators(product: Product, shape: Shape) -> int:
    num_warps = shape.block_n // 16 if shape.cuts else shape.num_warps
    return rows_of_w(product.kind, shape) * shape.block_m // (32 * num_warps)
