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
    from specdec.rounds import commit_tree, fill, fill_tree, gather_paths, grow_tree, propose
    from specdec.sampler import process_logits

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

N, D, K = 16, 6, 4
FLOATS = ("scores", "peaks", "sums", "logits", "floor", "temperature", "tile_scores", "floats")
FLOATS += (
    "state_probs",
    "threshold",
    "best",
    "temperatures",
    "calibration",
    "probs",
)
TYPES = {f"{name}_ptr": "*fp32" for name in FLOATS}
TYPES |= {"bias_ptr": "*fp32", "tile_ids_ptr": "*i32", "counts_ptr": "*i32", "in_prompt_ptr": "*i1"}
SLOTS = {"N": N, "X": N - 1, "D1": D + 1, "S": 64}
WALK = {"Q": D + 1, "ROWS": N, "HAS_WORDS": True, "ONE": 1 << 24}
LEVEL = {"K": K, "K_PADDED": K, "D": D, "D_PADDED": 8, "TILES": 32, "CHILDREN": 128, "RANKED": 64}
TOKENS = {"K": K, "STREAM": 0, "BLOCK": 1024, "IS_GPU": True}
CHAIN = {"K": 5, "K_PADDED": 8, "VARIES": True, "IS_SAMPLED": False, "HAS_D2T": True}
CHAIN |= {"LEAST": 1e-4, "S": 64, "BLOCK": 64}
ROUND = {"Q": 6, "Q_PADDED": 8, "SHARES": 0, "S": 64}
WORDS = {"STOP_IDS": 64, "HAS_WORDS": True, "WORDS": 64, "LENGTH": 16}
WEIGHTS = {"HAS_BIAS": True, "HAS_PENALTIES": True, "BLOCK": 2048}


IDS = {"ids_ptr": "*i32"}


def main() -> None:
    for may_stop in (False, True):
        build(fill_tree._fill_tree_kernel, SLOTS | {"N_PADDED": N, "MAY_STOP": may_stop})
        build(fill._fill_round_kernel, ROUND | {"MAY_STOP": may_stop})
    build(commit_tree._walk_trees_kernel, SLOTS | WALK)
    build(gather_paths._move_prompts_kernel, {"N": N, "Q": D + 1, "BLOCK": 1024})
    of_cache = {"G": 8, "S": 64, "C": 128, "PARTS": 8, "BLOCK": 1024}
    build(move_slots._move_slots_kernel, of_cache, {"cache_ptr": "*bf16"})
    for is_noisy in (False, True):
        constants = TOKENS | {"HAS_NOISE": is_noisy, "HAS_IDS": is_noisy}
        build(best_children._best_children_kernel, constants, {"ids_ptr": "*i32"})
    for stops in (False, True):
        for P, is_last in ((1, False), (K, False), (K, True)):
            constants = LEVEL | {"P": P, "P_PADDED": P, "IS_FIRST": P == 1, "IS_LAST": is_last}
            build(grow_tree._write_level_kernel, constants | {"HAS_D2T": True, "STOPS": stops})
        constants = {"N": N, "K": K, "BLOCK": 128, "STEP": 64, "STOPS": stops}
        build(grow_tree._keep_nodes_kernel, constants)
        for level in (0, 1, -1):
            build(propose._propose_kernel, CHAIN | {"LEVEL": level, "STOPS": stops}, IDS)
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
