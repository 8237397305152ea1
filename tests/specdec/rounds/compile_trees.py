"""Compile kernels of draft trees, and of drafts that stop, for a Hopper GPU, without one.

Prints each as it is done.

python -m tests.specdec.rounds.compile_trees

The interpreter lets pass what the compiler does not, such as a name of two types in two loops.
"""

import inspect
from unittest.mock import patch

import torch

with patch.object(torch.cuda, "is_available", lambda: True):  # kernels are Triton's then
    from specdec.kernels import best_children, move_slots, triton
    from specdec.rounds import children, commit, fill, gather_paths, prompts, propose, rank
    from specdec.sampler import process_logits

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

N, D, K = 16, 6, 4
FLOATS = ("scores", "peaks", "sums", "logits", "floor", "temperature", "tile_scores", "floats")
FLOATS += (
    "kept_probs",
    "threshold",
    "best",
    "temperatures",
    "calibration",
    "confidence",
    "probs",
)
TYPES = {f"{name}_ptr": "*fp32" for name in FLOATS}
TYPES |= {"bias_ptr": "*fp32", "tile_ids_ptr": "*i32", "counts_ptr": "*i32", "in_prompt_ptr": "*i1"}
SLOTS = {"N": N, "D1": D + 1, "S": 64}
WALK = {"Q": D + 1, "X": N - 1, "ROWS": N, "ONE": 1 << 24}
LEVEL = {"K": K, "K_PADDED": K, "D": D, "D_PADDED": 8, "TILES": 32, "CHILDREN": 128}
TOKENS = {"K": K, "STREAM": 0, "BLOCK": 1024, "IS_GPU": True}
CHAIN = {"K": 5, "HAS_PROBS": True, "IS_SAMPLED": False, "HAS_D2T": True}
CHAIN |= {"HAS_CONFIDENCE": True, "LEAST": 1e-4, "S": 64, "BLOCK": 64}
WORDS = {"STOP_IDS": 64, "HAS_WORDS": True, "WORDS": 64, "LENGTH": 16}
WEIGHTS = {"HAS_BIAS": True, "HAS_PENALTIES": True, "BLOCK": 2048}


IDS = {"ids_ptr": "*i32"}


def main() -> None:
    for has_paths, shares in ((True, 0), (False, 0), (False, 256)):
        kinds = {"HAS_PATHS": has_paths, "N_PADDED": N, "SHARES": shares}
        build(fill._fill_round_kernel, SLOTS | kinds)
    for has_paths, shared, is_pq in ((1, 0, 0), (0, 0, 0), (0, 1, 0), (0, 0, 1)):
        kinds = {"HAS_PATHS": has_paths, "IS_SHARED": shared, "IS_PQ": is_pq}
        for has_columns in (False, True):
            columns = {"HAS_PARENTS": has_columns, "HAS_PROBS": has_columns}
            build(commit._decision_kernel, SLOTS | WALK | kinds | columns)
    of_prompts = {"X": N - 1, "N_PADDED": 64, "HAS_PARENTS": True}
    build(prompts._commit_prompts_kernel, of_prompts)
    build(gather_paths._move_prompts_kernel, {"N": N, "Q": D + 1, "BLOCK": 1024})
    of_cache = {"G": 8, "S": 64, "C": 128, "PARTS": 8, "BLOCK": 1024}
    build(move_slots._move_slots_kernel, of_cache, {"cache_ptr": "*bf16"})
    for is_noisy in (False, True):
        constants = TOKENS | {"HAS_NOISE": is_noisy, "HAS_IDS": is_noisy}
        build(best_children._best_children_kernel, constants, {"ids_ptr": "*i32"})
    for stops in (False, True):
        for P, is_last in ((1, False), (K, False), (K, True)):
            constants = LEVEL | {"P": P, "P_PADDED": P, "IS_FIRST": P == 1, "IS_LAST": is_last}
            constants |= {"NODES": K * P, "STEP": K * P, "HAS_D2T": True, "STOPS": stops}
            build(children._write_children_kernel, constants)
        for is_first in (True, False):
            build(propose._write_nodes_kernel, CHAIN | {"IS_FIRST": is_first, "STOPS": stops}, IDS)
    build(rank._keep_nodes_kernel, {"X": N - 1, "K": K, "BLOCK": 128, "STEP": 64})
    for has_paths in (False, True):
        build(process_logits._weights_kernel, WEIGHTS | {"HAS_PATHS": has_paths})
        build(process_logits._forbid_kernel, WORDS | {"HAS_PATHS": has_paths})


def build(kernel, constants, types=None) -> None:
    """Pointers are to int64, and numbers int32, where nothing else is said."""
    constants = constants | {"PDL": True}
    types = TYPES | (types or {}) | dict.fromkeys(constants, "constexpr")
    names = list(inspect.signature(kernel.fn).parameters)
    signature = {
        name: types.get(name, "*i64" if name.endswith("_ptr") else "i32") for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, {})
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    print(kernel.fn.__name__)


if __name__ == "__main__":
    main()
