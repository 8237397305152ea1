"""Compile the kernels of 8-bit products for a Hopper GPU, without one.

python -m tests.specdec.kernels.compile_fp8 WHICH BLOCK_N BLOCK_M STAGES split|walk|gate FORM [CUTS]

WHICH: rows: few_rows.py; tiles: a program for each tile; persistent: as it says.
FORM: channel, block, or shared of persistent. walk: two splits by a program.
Prints bytes of shared memory and of spilled registers, and what `counts` finds.
"""

import re
import sys
from pathlib import Path
from unittest.mock import patch

import torch

with patch.object(torch.cuda, "is_available", lambda: True):  # kernels are Triton's then
    from specdec.kernels import gl, next_power_of_2, triton
    from specdec.kernels.few_rows import REGISTERS, few_rows_kernel
    from specdec.kernels.fp8 import products
    from specdec.kernels.persistent.kernel import Variant, persistent_kernel
    from specdec.kernels.tile_shapes import FP8, LEAST_SCALES, rows_at_once

from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tests.specdec.kernels.compile_persistent import HOPPER, desc, spilled_bytes


def main() -> None:
    which, *numbers = sys.argv[1:5]
    block_n, block_m, stages = map(int, numbers)
    kind, form = sys.argv[5:7]
    made = {"rows": few_rows, "tiles": tiles, "persistent": persistent}[which](
        block_n, block_m, stages, kind, form
    )
    ptx = made.asm["ptx"]
    if len(sys.argv) > 8:
        Path(sys.argv[8]).write_text(ptx)
    print(made.metadata.shared, spilled_bytes(ptx), *counts(ptx))


def counts(ptx: str) -> tuple[int, int, int]:
    """Count 8-bit products, those that keep nothing of their accumulators, and additions by us.

    The last beyond one for each register of those that begin anew.
    """
    products = re.findall(r"wgmma\S*m64n(\d+)k32\.f32\.e4m3\.e4m3.*?}, %\w+, %\w+, (\S+),", ptx)
    fresh = [int(columns) // 2 for columns, keeps in products if keeps == "0"]
    sums = len(re.findall(r"(?:add|fma)\.rn\.f32", ptx))
    return len(products), len(fresh), sums - sum(fresh)


def few_rows(block_n: int, block_m: int, stages: int, kind: str, form: str):
    is_gated = kind == "gate"
    w = desc("fp8e4nv", 8, block_n, 128)
    count = 2 if kind == "walk" else 1
    constants = {"IS_GATED": is_gated, "HAS_BIAS": True, "SPLITS": count, "WALKED": count}
    constants |= {"STAGES": stages, "FORM": form}
    places = dict.fromkeys(("x_scales", "w_scales", "up_scales"), "*fp32")
    if form == "block":
        widths = max(block_m, LEAST_SCALES), block_n, block_n
        places = dict(zip(places, map(scales_desc, widths), strict=True))
    signature = {
        "out_ptr": "*bf16" if is_gated else "*fp32",
        "x_desc": desc("fp8e4nv", 8, block_m, 128),
        "w_desc": w,
        "up_desc": w,
        "bias_ptr": "*bf16",
        **places,
        **dict.fromkeys(("T", "N", "K", "first"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    names = list(few_rows_kernel.arg_names)
    signature = {name: signature[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(few_rows_kernel, signature, values, {})
    options = {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": True}
    return triton.compile(source, target=HOPPER, options=options)


def persistent(block_n: int, block_m: int, stages: int, kind: str, form: str):
    cuts = int(sys.argv[7]) if len(sys.argv) > 7 else 1
    is_gated, groups = kind == "gate", block_n // 64
    is_shared, form = form == "shared", "block" if form == "shared" else form
    count = 2 if kind == "walk" else 1
    main_rows, tail = rows_at_once(FP8, block_m)
    num_scales = 0
    w = desc("fp8e4nv", 8, 128 if groups == 2 else 64, 128)
    out_rows = 32 if groups == 2 or is_gated else 16
    places = dict.fromkeys(("x_scales", "w_scales", "up_scales"), "*fp32")
    if form == "block":
        widths = next_power_of_2(block_m), next_power_of_2(block_n), next_power_of_2(block_n)
        places = dict(zip(places, map(scales_desc, widths), strict=True))
        num_scales = sum(widths[: 3 if is_gated else 2])
    variant = Variant(
        count,
        count,
        is_gated,
        has_bias=is_gated,
        tail=tail,
        cuts=cuts,
        num_stages=stages,
        height=block_n,
        groups=groups,
        copy_registers=40 if groups == 2 else 24,
        is_late=False,
        has_turns=False,
        form=form,
        num_scales=num_scales,
        is_shared=is_shared,
    )
    signature = {
        "out_desc": desc(*(("bf16", 16) if is_gated else ("fp32", 32)), 1, out_rows, 64),
        "w_desc": w,
        "up_desc": w,
        "x_desc": desc("fp8e4nv", 8, main_rows, 128),
        "rest_desc": desc("fp8e4nv", 8, tail or main_rows // cuts, 128),
        "bias_ptr": "*bf16",
        **places,
        **dict.fromkeys(("T", "N", "K"), "i32"),
        **dict.fromkeys(("VARIANT", "needed_ptr"), "constexpr"),
    }
    names = list(signature)
    values = {(names.index("VARIANT"),): variant, (names.index("needed_ptr"),): None}
    source = GluonASTSource(persistent_kernel, signature, values, {})
    return triton.compile(source, target=HOPPER, options={"num_warps": 4, "launch_pdl": True})


def scales_desc(width: int) -> str:
    layout = gl.NVMMASharedLayout(0, element_bitwidth=32, rank=2)
    return f"tensordesc<fp32{[1, width]},{layout!r}>"


def tiles(block_n: int, block_m: int, stages: int, kind: str, form: str):
    is_gated = kind == "gate"
    count = 2 if kind == "walk" else 1
    constants = {"IS_GATED": is_gated, "IS_BLOCK": form == "block", "HAS_BIAS": True}
    constants |= {"SPLITS": count, "WALKED": count, "PDL": True, "needed_ptr": None}
    w = f"tensordesc<fp8e4nv[{block_n}, 128]>"
    types = {
        "out_ptr": "*bf16",
        "x_desc": f"tensordesc<fp8e4nv[{block_m}, 128]>",
        "w_desc": w,
        "up_desc": w,
        "bias_ptr": "*bf16",
        "x_scales_ptr": "*fp32",
        "w_scales_ptr": "*fp32",
        **dict.fromkeys(("T", "N", "K", "stride_scales", "first"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    return compiled(
        products._fp8_kernel, types, constants, 8 if block_n * block_m > 8192 else 4, stages
    )


def compiled(kernel, types, constants, num_warps, num_stages):
    """Pointers, N, K and strides of rows are multiples of 16."""
    names = list(kernel.arg_names)
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in names if types[name][0] == "*" or name in ("N", "K", "stride_x")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, {name: types[name] for name in names}, values, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": True}
    return triton.compile(source, target=HOPPER, options=options)


if __name__ == "__main__":
    main()
