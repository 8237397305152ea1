"""Compile the kernels of experts for a Hopper GPU, without one.

python -m tests.specdec.kernels.compile_experts [all]

Prints a line for each kernel: its name, bytes of shared memory, bytes of spilled registers, and the
columns of its products. all: every candidate's tiles, else the likeliest.
"""

import inspect
import itertools
import re
import sys
from unittest.mock import patch

import torch

with patch.object(torch.cuda, "is_available", lambda: True):  # kernels are Triton's then
    from specdec.kernels import norms, triton
    from specdec.kernels.experts import copied, group, products, route
    from specdec.kernels.experts.tiles import COMPUTING_ROWS, ROWS, candidates
    from specdec.kernels.tile_shapes import row_pieces

from triton.compiler import ASTSource

from tests.specdec.kernels.compile_few_rows import spilled_bytes
from tests.specdec.kernels.compile_persistent import HOPPER

K, E = 8, 128
WIDTHS = {"gate_up": 2048, "down": 768}
ROWS_COPIED = {"out_ptr": "*bf16", "x_ptr": "*bf16"}
NORM = dict.fromkeys(
    ("out_ptr", "stream_ptr", "tap_ptr", "parts_ptr", "bias_ptr", "residual_ptr", "w_ptr"), "*bf16"
)


def main() -> None:
    floats = dict.fromkeys(("weights_ptr", "parts_ptr", "bias_ptr"), "*fp32")
    for part, is_sorted, is_placed, block_m in kinds(sys.argv[1:] == ["all"]):
        shapes = candidates(part, block_m, WIDTHS[part])
        for shape in shapes if sys.argv[1:] else shapes[:1]:
            compile_product(part, is_sorted, is_placed, shape)
    flags = {"IS_RENORMALIZED": False, "HAS_BIAS": True, "HAS_SLOTS": True, "HAS_ROWS": True}
    sizes = {"SPLITS": 8, "K": K, "BLOCK_K": K, "BLOCK_E": E}
    slots = {"slots_ptr": "*i64", "rows_ptr": "*i64"}
    show(route._route_kernel, floats | slots, flags | sizes, 1)
    show(copied._copy_kernel, ROWS_COPIED, {"SLOTS": K, "BLOCK_D": 2048}, 4)
    show(group._count_kernel, {}, {"PAIRS": group.PAIRS, "BLOCKS": group.BLOCKS}, 8)
    sizes = {"BLOCK_M": 128, "BLOCK_E": E, "PAIRS": group.PAIRS, "TILES": group.TILES}
    show(group._place_kernel, {}, sizes, 8)
    sizes = {"HAS_BIAS": False, "HAS_TAP": True, "SPLITS": K, "BLOCK_D": 2048, "FACTOR": 0.22}
    show(norms._add_rms_norm_kernel, NORM | {"eps": "fp32", "weights_ptr": "*fp32"}, sizes, 8)


def kinds(has_all):
    if not has_all:
        return (
            ("gate_up", True, True, 160),
            ("gate_up", True, False, 128),
            ("down", False, False, 64),
        )
    found = ((part, False, False, block_m) for part in WIDTHS for block_m in (16, 32, 64))
    ways = itertools.product(WIDTHS, (True,), (False, True), ROWS)
    return (*found, *ways)


def compile_product(part, is_sorted, is_placed, shape) -> None:
    block_m, tail = row_pieces(shape.block_m)
    types = {"out_ptr": "*bf16", "x_rows": "*bf16", "rest_rows": "*bf16"}
    if is_placed:
        for name, rows in (("x_rows", block_m), ("rest_rows", tail or block_m)):
            types[name] = f"tensordesc<bf16[{rows}, {shape.block_k}]>"
    types["w_desc"] = f"tensordesc<bf16[{shape.block_n}, {shape.block_k}]>"
    flags = {"IS_GATED": part == "gate_up", "HAS_TILES": is_sorted, "IS_WHOLE": True}
    flags["IS_KEPT"] = shape.block_m < COMPUTING_ROWS
    flags |= {"X_BY_PLACE": is_placed, "H_BY_PLACE": is_placed}
    sizes = {"SLOTS": K, "BLOCK_M": block_m, "TAIL": tail, "BLOCK_E": 2 * E, "BLOCK_P": K * block_m}
    constants = flags | sizes | {"BLOCK_S": K, "needed_ptr": None}
    show(products._expert_kernel, types, constants, shape.num_warps, shape.num_stages)


def show(kernel, types, constants, num_warps, num_stages=3) -> None:
    """Pointers are to int32 where nothing else is said; they and numbers are multiples of 16."""
    constants = constants | {"PDL": True}
    names = list(inspect.signature(kernel.fn).parameters)
    types = types | dict.fromkeys(constants, "constexpr")
    signature = {
        name: types.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in names
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    widths = [n for n in ("N", "K", "E", "D", "stride_x") if signature.get(n) == "i32"]
    aligned = [*(n for n in names if signature[n][0] == "*"), *widths]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, values, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": True}
    report(triton.compile(source, target=HOPPER, options=options), kernel.fn.__name__)


def report(compiled, name) -> None:
    ptx = compiled.asm["ptx"]
    columns = set(re.findall(r"wgmma\.mma_async\S*?m64n(\d+)k16", ptx)) or {"0"}
    print(name, compiled.metadata.shared, spilled_bytes(ptx), *columns)


if __name__ == "__main__":
    main()
