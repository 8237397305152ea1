"""Compile prompt_attention.py for a Hopper GPU, without one: prints its shared memory and products.

python -m tests.specdec.kernels.compile_prompt_attention HEADS KV_HEADS C bf16|fp16 [uniform]
"""

import sys
from unittest.mock import patch

import torch

with patch.object(torch.cuda, "is_available", lambda: True):  # kernels are Triton's then
    from specdec.kernels import next_power_of_2, prompt_attention, triton

from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tests.specdec.kernels.compile_persistent import desc


def main() -> None:
    compiled = compile_for_hopper(*map(int, sys.argv[1:4]), sys.argv[4], "uniform" in sys.argv)
    print(compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))


def compile_for_hopper(heads: int, kv_heads: int, C: int, dtype: str, is_uniform: bool):
    """The kernel that Triton makes."""
    group = next_power_of_2(heads // kv_heads)
    signature = {
        "out_ptr": f"*{dtype}",
        "q_desc": desc(dtype, 16, prompt_attention.ROWS // group, 1, group, C),
        "k_desc": desc(dtype, 16, 64, C),
        "v_desc": desc(dtype, 16, 64, C),
        **dict.fromkeys(("block_table_ptr", "idx_ptr", "positions_ptr", "starts_ptr"), "*i64"),
        **dict.fromkeys(("num_items", "num_uneven", "num_slots", "query_len", "R", "M"), "i32"),
        "scale": "fp32",
        "is_beside": "i32",
        "FORM": "constexpr",
    }
    form = prompt_attention.Form(heads, kv_heads, is_uniform)
    kernel = prompt_attention._prompt_attention_kernel
    source = GluonASTSource(kernel, signature, {(len(signature) - 1,): form}, {})
    options = {"num_warps": 4, "enable_fp_fusion": False, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    main()
