"""The best score and id of each row on every rank, from the tiles of each: what ranks exchange.

A rank without a choice gives -inf and any id. Of equal scores its lowest id is the one.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl
from specdec.kernels.cut_ids import CutIds
from specdec.kernels.overlap import begin


def launch_best_of_ranks(best: Tensor, ids: Tensor, cut: CutIds) -> tuple[Tensor, Tensor]:
    """Reduce maxima of tiles [tiles, T] to one of each row, and gather them: [n, T] each, strided.

    best: float32. ids: int32, lowest of the tile's best
    """
    tiles, T = best.shape
    out_2T = best.new_empty(2, T)  # scores, and the bits of ids
    options = {"BLOCK": next_power_of_2(tiles), "num_warps": 4} | launch_options(best)
    _best_of_tiles_kernel[(T,)](out_2T, best, ids, tiles, T, **options)
    best_nT, bits_nT = cut.exchange.gather(out_2T).unbind(1)
    return best_nT, bits_nT.view(torch.int32)


@jit(varying=("tiles", "T"))
def _best_of_tiles_kernel(
    out_ptr,  # [2, T] float32
    best_ptr,  # [tiles, T]
    ids_ptr,  # [tiles, T]
    tiles,
    T,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + i * T + t, mask=i < tiles, other=float("-inf"))
    ids = tl.load(ids_ptr + i * T + t, mask=i < tiles, other=1 << 30)
    top = tl.max(best, axis=0)
    lowest = tl.min(tl.where(best == top, ids, 1 << 30), axis=0)
    tl.store(out_ptr + t, top)
    tl.store(out_ptr + T + t, lowest.to(tl.float32, bitcast=True))
