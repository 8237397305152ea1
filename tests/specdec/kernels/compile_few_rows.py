"""Compile few_rows.py for a Hopper GPU, without one.

Prints bytes of shared memory, bytes of spilled registers, and copies before the wait.

python -m tests.specdec.kernels.compile_few_rows BLOCK_N BLOCK_M BLOCK_K STAGES split|walk|gate

walk: two of four splits, as a part.
"""

import sys
from unittest.mock import patch

import torch

with patch.object(torch.cuda, "is_available", lambda: True):  # kernels are Triton's then
    from specdec.kernels import triton
    from specdec.kernels.few_rows import REGISTERS, few_rows_kernel

from triton.experimental.gluon._runtime import GluonASTSource

from tests.specdec.kernels.compile_persistent import HOPPER, desc, spilled_bytes


def main() -> None:
    block_n, block_m, block_k, stages = map(int, sys.argv[1:5])
    is_gated = sys.argv[5] == "gate"
    w = desc("bf16", 16, block_n, block_k)
    splits, walked = (4, 2) if sys.argv[5] == "walk" else (1, 1)
    constants = {"IS_GATED": is_gated, "HAS_BIAS": True, "SPLITS": splits, "WALKED": walked}
    constants |= {"FORM": "plain", "STAGES": stages}
    signature = {
        "out_ptr": "*bf16" if is_gated else "*fp32",
        "x_desc": desc("bf16", 16, block_m, block_k),
        "w_desc": w,
        "up_desc": w,
        **dict.fromkeys(("bias_ptr", "x_scales", "w_scales", "up_scales"), "*bf16"),
        **dict.fromkeys(("T", "N", "K", "first"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    names = list(signature)
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(few_rows_kernel, signature, values, {})
    options = {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": True}
    compiled = triton.compile(source, target=HOPPER, options=options)
    ptx = compiled.asm["ptx"]
    early = ptx[: ptx.index("griddepcontrol.wait")].count("cp.async.bulk.tensor")
    print(compiled.metadata.shared, spilled_bytes(ptx), early)


if __name__ == "__main__":
    main()
