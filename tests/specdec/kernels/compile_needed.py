"""Compile the kernels of needed.py for a Hopper GPU, without one: with a number to look at and not.

    python -m tests.specdec.kernels.compile_needed [DIRECTORY] [C]

Prints each kernel's name and how many loads its PTX has, without the number and with it.
DIRECTORY: also write the PTX of the first kind there, to compare it with another version's.
C: head_dim, if not 128.
"""

import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch

with patch.object(torch.cuda, "is_available", lambda: True):  # kernels are Triton's then
    from specdec.kernels import (
        best_children,
        best_token,
        gate_up,
        linear,
        rotate_and_store,
        triton,
    )
    from specdec.kernels.attention import combine, shared_splits, walk

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FLOATS = ("acc", "stats", "sinks", "best", "sums", "parts", "scores", "peaks", "logits", "floor")
TYPES = {
    **{f"{name}_ptr": "*fp32" for name in (*FLOATS, "temperature", "cos", "sin")},
    "ids_ptr": "*i32",
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), "*bf16"),
    **dict.fromkeys(("bias_ptr", "q_norm_ptr", "k_norm_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("x_desc", "tail_desc"), "tensordesc<bf16[16, 128]>"),
    **dict.fromkeys(("w_desc", "gate_desc", "up_desc"), "tensordesc<bf16[64, 128]>"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
}
HEADS = {"H": 32, "G": 8, "S": 64, "C": 128}
CUT = {"IS_UNIFORM": True, "GROUP": 4, "TOKENS": 4}
PATHS = {
    "HAS_PATHS": True,
    "PATH_ROWS": 16,
    "SHARED": 64,
    "IS_SPLIT": True,
    "IN_ONE_LOOP": False,
    "LOOKS_FIRST": False,
}
ADDED_UP = {
    "FEW": combine.FEW_AT_ONCE,
    "MANY": combine.MANY_AT_ONCE,
    "COLUMNS": 32,
    "LINE_COLUMNS": 32,
}
KERNELS = (
    (linear._linear_kernel, {"HAS_BIAS": False, "TAIL": 0, "SPLITS": 2, "WALKED": 1}),
    (gate_up._gate_up_kernel, {"HAS_BIAS": False, "TAIL": 0}),
    (
        best_token._tile_maxima_kernel,
        {"HAS_MASK": False, "HAS_SUMS": True, "STOP_IDS": 0, "FACTOR": 1.0, "STRIDE": 0},
    ),
    (
        rotate_and_store._rotate_and_store_kernel,
        HEADS | {"HEADS": 8, "SPLITS": 2, "HAS_BIAS": False, "HAS_NORMS": False},
    ),
    (
        best_children._best_children_kernel,
        {"K": 4, "HAS_NOISE": False, "STREAM": 0, "HAS_IDS": False, "BLOCK": 1024, "IS_GPU": True},
    ),
    (
        walk._paged_attention_kernel,
        HEADS | CUT | PATHS | {"IS_HELPED": False, "SLOTS": 1, "SKIP": True},
    ),
    (combine._combine_kernel, HEADS | ADDED_UP | {"IS_SUMMED": False}),
    *(
        (shared_splits._share_splits_kernel, HEADS | CUT | {"SLOTS": 8, "LONG": is_long})
        for is_long in (False, True)
    ),
    (
        combine._combine_long_kernel,
        HEADS | ADDED_UP | {"IS_UNIFORM": True, "SLOTS": 8},
    ),
)


def main() -> None:
    head_dim = {"C": int(sys.argv[2])} if sys.argv[2:] else {}
    for kernel, constants in KERNELS:
        if "C" in constants:
            constants = constants | head_dim
        name = kernel.fn.__name__ + ("_long" if constants.get("LONG") else "")
        plain, needed = (ptx_of(kernel, constants, has_number) for has_number in (False, True))
        print(name, *(text.count("ld.global") for text in (plain, needed)))
        if sys.argv[1:]:
            (Path(sys.argv[1]) / f"{name}.ptx").write_text(plain)


def ptx_of(kernel, constants, has_number: bool, given: Sequence[str] = ()) -> str:
    """Without line numbers. Pointers are to int64, numbers int32, where nothing else is said.

    given: the window, sinks or what is added, which are None otherwise
    """
    constants = constants | {"PDL": True}
    names = list(inspect.signature(kernel.fn).parameters)
    absent = {"sinks_ptr", "window", *(() if has_number else ("needed_ptr",))} - {*given}
    constants = {name: None for name in absent if name in names} | constants
    types = TYPES | dict.fromkeys(constants, "constexpr")
    signature = {
        name: types.get(name, "*i64" if name.endswith("_ptr") else "i32") for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, {})
    options = {"num_warps": 4, "num_stages": 3}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    kept = (line for line in compiled.asm["ptx"].splitlines() if not re.match(r"\s*\.loc", line))
    return "\n".join(kept).split(".section")[0]


if __name__ == "__main__":
    main()
