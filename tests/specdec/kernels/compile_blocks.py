"""Compile the kernels of block drafts for a Hopper GPU, without one, at Qwen3-8B's sizes.

    python -m tests.specdec.kernels.compile_blocks

Prints each kernel's name, its registers, its spilled bytes and its loads from memory.
"""

import inspect
import re
import subprocess
from tempfile import NamedTemporaryFile
from unittest.mock import patch

import torch

with patch.object(torch.cuda, "is_available", lambda: True):  # kernels are Triton's then
    from specdec.kernels import (
        add_transitions,
        best_token,
        convolve,
        store_context,
        triton,
    )
    from specdec.rounds import block_rows, candidates

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HEADS = {"L": 5, "G": 8, "S": 64, "C": 128, "HEADS": 8, "PDL": True}
MAXIMA = {"HAS_MASK": False, "STOP_IDS": 0, "needed_ptr": None, "FACTOR": 1.0, "PDL": True}
BFLOATS = (
    *("caches_ptr", "parts_ptr", "bias_ptr", "k_norm_ptr", "out_ptr", "base_ptr", "changes_ptr"),
    *("projected_ptr", "predecessor_ptr", "successor_ptr", "feature_ptr", "after_ptr"),
)
FLOATS = (
    *("cos_ptr", "sin_ptr", "best_ptr", "sums_ptr", "scores_ptr", "peaks_ptr"),
    *("logits_ptr", "floor_ptr", "temperature_ptr"),
)
TYPES = {
    **dict.fromkeys(BFLOATS, "*bf16"),
    **dict.fromkeys(FLOATS, "*fp32"),
    "eps": "fp32",
    "ids_ptr": "*i32",
}
KERNELS = {
    "store context": (
        store_context._store_context_kernel,
        2,
        HEADS | {"SPLITS": 1, "HAS_BIAS": False, "HAS_NORMS": True},
    ),
    "store context, 2 splits, biases": (
        store_context._store_context_kernel,
        2,
        HEADS | {"SPLITS": 2, "HAS_BIAS": True, "HAS_NORMS": False},
    ),
    "fill blocks": (
        block_rows._fill_blocks_kernel,
        1,
        {"ROWS": 8, "ROWS_PADDED": 8, "EXTRA_ROWS": 1, "S": 64, "PDL": True},
    ),
    "convolve": (
        convolve._convolve_kernel,
        4,
        {"ROWS": 8, "GROUPS": 256, "SIZE": 16, "SPLITS": 1, "HAS_BIAS": False, "BLOCK": 1024}
        | {"PDL": True},
    ),
    "add transitions": (
        add_transitions._add_transitions_kernel,
        4,
        {"K": 16, "K_PADDED": 16, "BLOCK": 256, "PDL": True},
    ),
    "best of lanes": (candidates._best_of_lanes_kernel, 8, {"K": 16, "LANES": 4096, "PDL": True}),
    "markov maxima": (
        candidates._markov_maxima_kernel,
        8,
        {"HAS_SUMS": True, "BLOCK": 32, "WIDTH": 256, "PDL": True},
    ),
    **{
        f"lanes{', drawn' * is_drawn}": (
            candidates._lanes_kernel,
            8,
            {"HAS_NOISE": is_drawn, "STREAM": 0, "HAS_IDS": False, "LANES": 4096}
            | {"IS_GPU": True, "PDL": True},
        )
        for is_drawn in (False, True)
    },
    **{
        f"maxima of {rows} rows": (
            best_token._tile_maxima_kernel,
            4,
            MAXIMA | {"HAS_SUMS": False, "TAIL": tail},
        )
        for rows, tail in ((16, 0), (64, 0), (48, 16))
    },
}


def main() -> None:
    for name, (kernel, num_warps, constants) in KERNELS.items():
        rows = re.search(r"maxima of (\d+)", name)
        compiled = compile_for_hopper(kernel, num_warps, constants, int(rows[1]) if rows else 16)
        loads = compiled.asm["ptx"].count("ld.global")
        print(f"{name:<34}", *usage_of(compiled.asm["cubin"]), f"{loads} loads")


def compile_for_hopper(kernel, num_warps: int, constants, rows: int):
    names = list(inspect.signature(kernel.fn).parameters)
    tiles = {
        "x_desc": f"tensordesc<bf16[{min(rows, 64) if rows != 48 else 32}, 128]>",
        "tail_desc": "tensordesc<bf16[16, 128]>",
        "w_desc": "tensordesc<bf16[128, 128]>",
    }
    types = TYPES | tiles | dict.fromkeys(constants, "constexpr")
    if "ROWS" in constants:
        types["ids_ptr"] = "*i64"
    signature = {
        name: types.get(name, "*i64" if name.endswith("_ptr") else "i32") for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    options = {"num_warps": num_warps, "num_stages": 3, "launch_pdl": True}
    source = ASTSource(kernel, signature, places, hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def usage_of(cubin: bytes) -> list[str]:
    """Registers of a thread, and bytes on its stack, by the GPU's own tool."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return re.findall(r"REG:\d+|STACK:\d+", done.stdout)


if __name__ == "__main__":
    main()
