"""Compile the kernels that choose tokens on a rank of several for a Hopper GPU, without one.

Prints each as it is done.

python -m tests.specdec.kernels.compile_cut_ids
"""

from itertools import pairwise
from unittest.mock import patch

import torch

with patch.object(torch.cuda, "is_available", lambda: True):  # kernels are Triton's then
    from specdec.kernels import best_of_ranks, block_sums, choose_token, cut_table, mask_rows
    from specdec.kernels.support_floor import bins, ranks
    from tests.specdec.rounds.compile_trees import build

FLOATS = ("out", "best", "sums", "logits", "floor", "temperature", "tops", "log_min_p", "top_p")
TYPES = {f"{name}_ptr": "*fp32" for name in FLOATS} | {"bins_ptr": "*i32", "places_ptr": "*i32"}
TYPES |= {"ids_ptr": "*i32", "keys_ptr": "*i32"}
SIZES = {"TILES": 64, "NUM_BINS": 128}


def main() -> None:
    build(block_sums._block_sums_kernel, {"BLOCK": 4096}, TYPES | {"x_ptr": "*fp32"})
    build(best_of_ranks._best_of_tiles_kernel, {"BLOCK": 1024}, TYPES)
    of_table = {"out_ptr": "*bf16", "table_ptr": "*bf16", "ids_ptr": "*i64"}
    build(cut_table._own_rows_kernel, {"BLOCK": 4096}, of_table)
    bits = {"out_ptr": "*i16", "rows_ptr": "*i16"}
    build(cut_table._merge_kernel, {"N": 4, "BLOCK": cut_table.BLOCK}, bits)
    noise = {"STREAM": 0, "BLOCK": 1024, "IS_GPU": True}
    for has_ids in (False, True):
        flags = {"HAS_IDS": has_ids, "HAS_SUMS": has_ids}
        build(choose_token._choose_kernel, noise | flags, TYPES)
    build(mask_rows._mask_rows_kernel, {"BLOCK": 2048}, TYPES | {"bits_ptr": "*i32"})
    build(bins.gather_kernel, SIZES | {"BLOCK": 1024}, TYPES)
    for taken, given in sorted(set(pairwise(ranks.STAGES))):
        stage = {"TAKEN": taken, "GIVEN": given, "REACHES": ranks.REACHES, "BLOCK": ranks.BLOCK}
        build(ranks._reach_kernel, SIZES | stage, TYPES | {"out_ptr": "*i64"})


if __name__ == "__main__":
    main()
