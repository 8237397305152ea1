"""Compile persistent.py for a Hopper GPU, without one: prints its shared memory and its products.

python -m tests.specdec.kernels.compile_persistent BLOCK_M CUTS SPLITS split|gate [needed]

needed: as a pass that may not be needed launches it; see kernels/needed.py.
"""

import sys
from unittest.mock import patch

import torch

with patch.object(torch.cuda, "is_available", lambda: True):  # kernels are Triton's then
    from specdec.kernels import gl, persistent, triton

from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from specdec.kernels.tile_shapes import RELAY, row_pieces


def main() -> None:
    block_m, cuts, splits = map(int, sys.argv[1:4])
    is_gated = sys.argv[4] == "gate"
    is_needed = "needed" in sys.argv
    is_relay = cuts == RELAY
    cuts = 1 if is_relay else cuts
    main_rows, tail = row_pieces(block_m)
    x = {rows: desc("bf16", 16, rows, 64) for rows in (128, main_rows, tail or main_rows // cuts)}
    signature = {
        "out_desc": desc("bf16", 16, 1, 32, 64) if is_gated else desc("fp32", 32, 1, 32, 64),
        "w_desc": x[128],
        "up_desc": x[128],
        "x_desc": x[main_rows],
        "rest_desc": x[tail or main_rows // cuts],
        "bias_ptr": "*bf16",
        "room_ptr": "*fp32",
        "flags_ptr": "*i32",
        **dict.fromkeys(("T", "N", "K"), "i32"),
        "FORM": "constexpr",
        "needed_ptr": "*i64" if is_needed else "constexpr",
    }
    form = persistent.Form(
        splits,
        splits,
        is_gated,
        has_bias=True,
        tail=tail,
        cuts=cuts,
        is_relay=is_relay,
        num_left=persistent.LEFT_SUMS,
        num_stages=3,
    )
    kernel = persistent._persistent_kernel
    names = list(signature)
    constants = {(names.index("FORM"),): form}
    if not is_needed:
        constants[names.index("needed_ptr"),] = None
    source = GluonASTSource(kernel, signature, constants, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    print(compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))


def desc(dtype: str, bits: int, *block: int) -> str:
    """The type of a descriptor, as Triton writes it."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=len(block))
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


if __name__ == "__main__":
    main()
