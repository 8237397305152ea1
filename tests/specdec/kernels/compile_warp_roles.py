"""Compile a kernel of warp_roles.py for a Hopper GPU, without one: its shared memory and products.

python -m tests.specdec.kernels.compile_warp_roles prompt|wide HEADS KV_HEADS C bf16|fp16 [WORDS]
WORDS, of prompts: window, sinks
"""

import sys
from unittest.mock import patch

import torch

with patch.object(torch.cuda, "is_available", lambda: True):  # kernels are Triton's then
    from specdec.kernels import next_power_of_2, triton, warp_roles
    from specdec.kernels.attention import wide_walk
    from specdec.kernels.prompt import attention

from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tests.specdec.kernels.compile_persistent import desc


def main() -> None:
    of_kernel = {"prompt": compile_prompt, "wide": compile_wide}[sys.argv[1]]
    compiled = of_kernel(*map(int, sys.argv[2:5]), *sys.argv[5:])
    print(compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))


def compile_prompt(heads: int, kv_heads: int, C: int, dtype: str, *words: str):
    """The kernel that Triton makes."""
    signature = {
        "out_ptr": f"*{dtype}",
        **descs(heads // kv_heads, C, dtype),
        "sinks_ptr": "*fp32" if "sinks" in words else "constexpr",
        **dict.fromkeys(("block_table_ptr", "idx_ptr", "positions_ptr", "starts_ptr"), "*i64"),
        **dict.fromkeys(("num_items", "num_uneven", "num_slots", "query_len", "R", "M"), "i32"),
        "scale": "fp32",
        "is_beside": "i32",
        "window": "i32" if "window" in words else "constexpr",
    }
    variant = attention.Variant(heads, kv_heads, is_uniform=False)
    return compile_for_hopper(attention._prompt_attention_kernel, signature, variant)


def compile_wide(heads: int, kv_heads: int, C: int, dtype: str):
    """The kernel that Triton makes."""
    group = next_power_of_2(heads // kv_heads)
    signature = {
        **descs(heads // kv_heads, C, dtype),
        "acc_desc": desc("fp32", 32, 1, warp_roles.ROWS // group // 2, 1, group, C),
        "stats_ptr": "*fp32",
        **dict.fromkeys(("block_table_ptr", "idx_ptr", "path_starts_ptr"), "*i64"),
        "lists_ptr": "*i16",
        **dict.fromkeys(("fewer", "counts", "width", "query_len", "R", "M", "NS"), "i32"),
        "scale": "fp32",
    }
    variant = wide_walk.WideVariant(heads, kv_heads)
    return compile_for_hopper(wide_walk._wide_walk_kernel, signature, variant)


def descs(group: int, C: int, dtype: str) -> dict[str, str]:
    """Of queries, keys and values."""
    group = next_power_of_2(group)
    return {
        "q_desc": desc(dtype, 16, warp_roles.ROWS // group, 1, group, C),
        "k_desc": desc(dtype, 16, 64, C),
        "v_desc": desc(dtype, 16, 64, C),
    }


def compile_for_hopper(kernel, signature: dict[str, str], variant):
    absent = [i for i, kind in enumerate(signature.values()) if kind == "constexpr"]
    constants = {**{(i,): None for i in absent}, (len(signature),): variant}
    signature = {**signature, "VARIANT": "constexpr"}
    source = GluonASTSource(kernel, signature, constants, {})
    options = {"num_warps": 4, "enable_fp_fusion": False, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    main()
