"""Compile persistent/ for a Hopper GPU, without one.

Prints bytes of shared memory, products, and bytes of spilled registers.

python -m tests.specdec.kernels.compile_persistent BLOCK_N BLOCK_M CUTS SPLITS split|gate [WORDS]

SPLITS: all are walked.
WORDS: needed: as a pass that may not be needed launches it, see kernels/needed.py; late: results of
16 bits that leave beside the next tile's products.
"""

import os
import re
import subprocess
import sys
from tempfile import NamedTemporaryFile
from unittest.mock import patch

import torch

with patch.object(torch.cuda, "is_available", lambda: True):  # kernels are Triton's then
    from specdec.kernels import gl, triton
    from specdec.kernels.persistent.kernel import Variant, persistent_kernel

from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from specdec.kernels.tile_shapes import row_pieces, takes_turns

HOPPER = GPUTarget("cuda", 90, 32)


def main() -> None:
    options = {"num_warps": 4}
    compiled = triton.compile(source_of(sys.argv[1:]), target=HOPPER, options=options)
    ptx = compiled.asm["ptx"]
    print(compiled.metadata.shared, ptx.count("wgmma.mma_async"), spilled_bytes(ptx))


def source_of(words: list[str]) -> GluonASTSource:
    """What Triton's compiler takes; words as above."""
    block_n, block_m, cuts, splits = map(int, words[:4])
    is_gated = words[4] == "gate"
    is_needed = "needed" in words
    is_late = "late" in words
    main_rows, tail = row_pieces(block_m)
    has_turns = takes_turns(words[4], block_n, block_m, cuts)
    groups = block_n // 64
    height = block_n // 2 if has_turns else block_n
    is_rounded = is_gated or is_late
    out_rows = 32 if groups == 2 or is_rounded else 16
    out = (1, out_rows, height // groups)
    rows, block_k = w_block(groups)
    w_shape = (rows // 16, 2, 8, block_k) if has_turns else (rows, block_k)
    w = desc("bf16", 16, *w_shape)
    signature = {
        "out_desc": desc(*(("bf16", 16) if is_rounded else ("fp32", 32)), *out),
        "w_desc": w,
        "up_desc": w,
        "x_desc": desc("bf16", 16, main_rows, 64),
        "rest_desc": desc("bf16", 16, tail or main_rows // cuts, 64),
        **dict.fromkeys(("bias_ptr", "x_scales", "w_scales", "up_scales"), "*bf16"),
        **dict.fromkeys(("T", "N", "K"), "i32"),
        "VARIANT": "constexpr",
        "needed_ptr": "*i64" if is_needed else "constexpr",
    }
    variant = Variant(
        splits,
        splits,
        is_gated and not has_turns,
        has_bias=True,
        tail=tail,
        cuts=cuts,
        num_stages=3,
        height=height,
        groups=groups,
        copy_registers=40 if groups == 2 else 24,
        is_late=is_late,
        has_turns=has_turns,
        form="plain",
        num_scales=0,
        is_shared=False,
    )
    names = list(signature)
    constants = {(names.index("VARIANT"),): variant}
    if not is_needed:
        constants[names.index("needed_ptr"),] = None
    return GluonASTSource(persistent_kernel, signature, constants, {})


def w_block(groups: int) -> tuple[int, int]:
    return (128 if groups == 2 else 64), 64


def desc(dtype: str, bits: int, *block: int) -> str:
    """The type of a descriptor, as Triton writes it."""
    swizzled = min(128, block[-1] * bits // 8)
    layout = gl.NVMMASharedLayout(swizzled, element_bitwidth=bits, rank=len(block))
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def spilled_bytes(ptx: str) -> int:
    """That threads store, since registers do not suffice."""
    with NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = triton.knobs.nvidia.ptxas.path
        command = [ptxas, "-v", "--gpu-name", "sm_90a", file.name, "-o", os.devnull]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr)))


if __name__ == "__main__":
    main()
