"""In which order small kernels load and compute, compiled for a Hopper GPU, without one.

Prints an instruction as a letter: W waits for the kernel before, L loads, S stores, P puts into
shared memory, C computes with float32. Or with "sums" how many float32 sums, products and sums of a
product there are, with and without leave to fuse the former two.

python -m tests.specdec.kernels.compile_loads rotate|combine|tails [sums]
"""

import re
import subprocess
import sys
from tempfile import NamedTemporaryFile
from unittest.mock import patch

import torch

with patch.object(torch.cuda, "is_available", lambda: True):  # kernels are Triton's then
    from specdec.kernels import triton
    from specdec.kernels.attention.combine import FEW_AT_ONCE, MANY_AT_ONCE, _combine_kernel
    from specdec.kernels.attention.walk import _paged_attention_kernel
    from specdec.kernels.rotate_and_store import _rotate_and_store_kernel

from triton.compiler import ASTSource

from tests.specdec.kernels.compile_persistent import HOPPER

SIZES = {"H": 32, "G": 8, "S": 64, "C": 128, "PDL": True, "needed_ptr": None}
KERNELS = {
    "rotate": (
        _rotate_and_store_kernel,
        2,
        {**SIZES, "HEADS": 8, "SPLITS": 1, "HAS_BIAS": False, "HAS_NORMS": False},
    ),
    "combine": (
        _combine_kernel,
        1,
        {
            **SIZES,
            "sinks_ptr": None,
            "window": None,
            "sharers": None,
            "fewer": None,
            "IS_SUMMED": False,
            "FEW": FEW_AT_ONCE,
            "MANY": MANY_AT_ONCE,
            "COLUMNS": 128,
            "LINE_COLUMNS": 32,
        },
    ),
    "tails": (
        _paged_attention_kernel,
        4,
        {
            **SIZES,
            "sinks_ptr": None,
            "listed_ptr": None,
            "window": None,
            "IS_SPLIT": True,
            "IS_UNIFORM": True,
            "IS_HELPED": False,
            "SLOTS": 1,
            "GROUP": 4,
            "TOKENS": 8,
            "HAS_PATHS": True,
            "IS_WIDE": True,  # other kernels walk the shared keys
            "PATH_ROWS": 16,
            "SHARED": 64,
            "SKIP": True,
            "IN_ONE_LOOP": False,
            "LOOKS_FIRST": False,
        },
    ),
}
FLOATS = {
    "rotate": {"cos_ptr", "sin_ptr"},
    "combine": {"acc_ptr", "stats_ptr"},
    "tails": {"acc_ptr", "stats_ptr"},
}
NUMBERS = "positions", "slots", "path_starts", "path_slots", "block_table", "idx", "starts"
LETTERS = {
    "ACQBULK": "W",
    "LDG": "L",
    "STG": "S",
    "STS": "P",
    "FADD": "C",
    "FFMA": "C",
    "MUFU": "C",
}


def main() -> None:
    name = sys.argv[1]
    if sys.argv[2:] == ["sums"]:
        for may_fuse in (True, False):
            ptx = compiled(name, may_fuse).asm["ptx"]
            found = re.findall(r"\b(add|sub|mul|fma)(?:\.rn)?\.f32", ptx)
            print(*(found.count(each) for each in ("add", "sub", "mul", "fma")))
    else:
        cubin = compiled(name, may_fuse=name != "combine").asm["cubin"]
        print("".join(LETTERS[each] for each in _instructions(cubin)))


def compiled(name: str, may_fuse: bool) -> triton.compiler.CompiledKernel:
    kernel, num_warps, constants = KERNELS[name]
    names = kernel.arg_names
    signature = {each: _type_of(each, FLOATS[name]) for each in names} | dict.fromkeys(
        constants, "constexpr"
    )
    aligned = [each for each in names if each.endswith("_ptr") and each not in constants]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(each),): value for each, value in constants.items()},
        {(names.index(each),): [["tt.divisibility", 16]] for each in aligned},
    )
    options = {"num_warps": num_warps, "launch_pdl": True, "enable_fp_fusion": may_fuse}
    return triton.compile(source, target=HOPPER, options=options)


def _type_of(name: str, floats: set[str]) -> str:
    if not name.endswith("_ptr"):
        return "fp32" if name in ("eps", "scale") else "i32"
    if name.removesuffix("_ptr") in NUMBERS:
        return "*i64"
    return "*fp32" if name in floats else "*bf16"


def _instructions(cubin: bytes) -> list[str]:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return re.findall(rf"\b({'|'.join(LETTERS)})\b", done.stdout)


if __name__ == "__main__":
    main()
