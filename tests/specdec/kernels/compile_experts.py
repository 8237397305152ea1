"""Compile the kernels of experts for a Hopper GPU, without one.

python -m tests.specdec.kernels.compile_experts [all]

Prints a line for each kernel: its name, bytes of shared memory, bytes of spilled registers, and the
columns of its products; then, where these read W from registers, how many of them may still run
when the next ones are written; of 8 bits in blocks, how many numbers are loaded after a product has
begun. all: every candidate's tiles, else the likeliest.
"""

import inspect
import re
import sys
from unittest.mock import patch

import torch

with patch.object(torch.cuda, "is_available", lambda: True):  # kernels are Triton's then
    from specdec.kernels import norms, triton
    from specdec.kernels.experts import group, products, route
    from specdec.kernels.experts.mxfp4 import ROWS as ROWS_OF_BLOCK
    from specdec.kernels.experts.mxfp4 import ROWS_OF_WORDS, WORDS
    from specdec.kernels.experts.tiles import COMPUTING_ROWS, ROWS, ROWS_FP8, candidates
    from specdec.kernels.experts.weight import Form
    from specdec.kernels.tile_shapes import row_pieces

from triton.compiler import ASTSource

from tests.specdec.kernels.compile_few_rows import spilled_bytes
from tests.specdec.kernels.compile_persistent import HOPPER

K, E = 8, 128
FORMS: dict[str, Form] = {"plain": "plain", "packed": "packed", "channel": "fp8", "block": "fp8"}
WIDTHS = {"gate_up": 2048, "down": 768}
GPT_OSS = 2880  # both widths
NORM = dict.fromkeys(
    ("out_ptr", "stream_ptr", "tap_ptr", "parts_ptr", "bias_ptr", "residual_ptr", "w_ptr"), "*bf16"
)


def main() -> None:
    floats = dict.fromkeys(("weights_ptr", "parts_ptr", "bias_ptr"), "*fp32")
    has_all = sys.argv[1:] == ["all"]
    for form in FORMS:
        widths = dict.fromkeys(WIDTHS, GPT_OSS) if form == "packed" else WIDTHS
        for part, is_sorted, block_m in kinds(has_all):
            if form in ("channel", "block"):
                block_m = next(each for each in ROWS_FP8 if each >= min(block_m, 128))
            shapes = candidates(part, block_m, widths[part], FORMS[form])
            for shape in shapes if has_all else shapes[:1]:
                compile_product(part, is_sorted, shape, form)
    flags = {"IS_RENORMALIZED": False, "HAS_BIAS": True, "HAS_SLOTS": True, "HAS_ROWS": True}
    sizes = {"SPLITS": 8, "K": K, "BLOCK_K": K, "BLOCK_E": E}
    slots = {"slots_ptr": "*i64", "rows_ptr": "*i64"}
    show(route._route_kernel, floats | slots, flags | sizes, 1)
    show(group._count_kernel, {}, {"PAIRS": group.PAIRS, "BLOCKS": group.BLOCKS}, 8)
    sizes = {"BLOCK_M": 128, "BLOCK_E": E, "PAIRS": group.PAIRS, "TILES": group.TILES}
    show(group._place_kernel, {}, sizes, 8)
    sizes = {"HAS_BIAS": False, "HAS_TAP": True, "SPLITS": K, "BLOCK_D": 2048, "FACTOR": 0.22}
    sizes |= {"scales_ptr": None, "IS_BLOCK": False}
    show(norms._add_rms_norm_kernel, NORM | {"eps": "fp32", "weights_ptr": "*fp32"}, sizes, 8)


def kinds(has_all):
    if not has_all:
        return ("gate_up", True, 160), ("down", False, 64)
    found = ((part, False, block_m) for part in WIDTHS for block_m in (16, 32, 64))
    return (*found, *((part, True, block_m) for part in WIDTHS for block_m in ROWS))


def compile_product(part, is_sorted, shape, form) -> None:
    """form: packed: gpt-oss: MXFP4 with biases and the clamped SwiGLU"""
    is_packed, is_fp8 = form == "packed", FORMS[form] == "fp8"
    types = {"out_ptr": "*bf16", "x_ptr": "*bf16", "bias_ptr": "*bf16"}
    number = "fp8e4nv" if is_fp8 else "bf16"
    types["w"] = f"tensordesc<{number}[{shape.block_n}, {shape.block_k}]>"
    slots, width = (4, GPT_OSS) if is_packed else (K, WIDTHS[part])
    flags = {"IS_GATED": part == "gate_up", "HAS_TILES": is_sorted, "IS_COMPILED": True}
    flags |= {"IS_KEPT": shape.block_m < COMPUTING_ROWS, "IS_WHOLE": width % shape.block_k == 0}
    block_m, tail = row_pieces(shape.block_m)
    sizes = {"BLOCK_N": shape.block_n, "BLOCK_K": shape.block_k, "BLOCK_M": block_m, "TAIL": tail}
    sizes |= {"BLOCK_E": 2 * E, "BLOCK_P": slots * block_m, "SLOTS": slots, "BLOCK_S": slots}
    constants = flags | sizes | {"needed_ptr": None, "IS_BLOCK": form == "block"}
    if is_fp8:
        types |= {"x_ptr": "*fp8e4nv", "x_scales_ptr": "*fp32", "scales_ptr": "*fp32"}
    else:
        constants |= {"x_scales_ptr": None}
    if is_packed:
        is_gated = part == "gate_up"
        rows = shape.block_n // ROWS_OF_BLOCK * ROWS_OF_WORDS * (2 if is_gated else 1)
        types["w"] = f"tensordesc<i32[{rows}, {WORDS}]>"
        constants |= {"LIMIT": 7.0 if is_gated else None, "ALPHA": 1.702 if is_gated else None}
    else:
        constants |= dict.fromkeys(("LIMIT", "ALPHA", "bias_ptr"))
        constants |= {} if is_fp8 else {"scales_ptr": None}
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
    compiled = triton.compile(source, target=HOPPER, options=options)
    report(compiled, kernel.fn.__name__, constants.get("IS_BLOCK") and "w" in names)


def report(compiled, name, is_block) -> None:
    ptx = compiled.asm["ptx"]
    columns = set(re.findall(r"wgmma\.mma_async\S*?m64n(\d+)k(?:16|32)", ptx)) or {"0"}
    running = ()
    if re.search(r"wgmma\.mma_async[^;]*?\}, *\{", ptx):
        waits = re.findall(r"wgmma\.wait_group\S* (\d+)", ptx)
        running = "running", max(map(int, waits))
    if is_block:
        _, after = ptx.split("wgmma.mma_async", 1)
        running = "late", after.count("ld.global")
    print(name, compiled.metadata.shared, spilled_bytes(ptx), *columns, *running)


if __name__ == "__main__":
    main()
