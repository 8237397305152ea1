"""The k best draft tokens after each row, by logits + temperature * noise, tile by tile of columns.

A tile leaves its k best scores and their ids, the best first and the lowest id of equals, and the
greatest score with the sum of exp(score - greatest), from which a later kernel has the log softmax.
Tokens below a row's floor have the score -inf, and so has NaN. The noise g is that of gumbel.py at
the position of the drawn token, within 1e-4, by the hardware's logarithm: a draft is a guess.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, tl
from specdec.kernels.choose_token import NoiseKeys, _draws
from specdec.kernels.cut_ids import CutIds, first_id, tile_columns_of
from specdec.kernels.gumbel import gumbel_estimate
from specdec.kernels.needed import need
from specdec.kernels.overlap import begin


class Perturbation(NamedTuple):
    """What rows are drawn with. floor_X: least logit / temperature, of rows that are not greedy."""

    floor_X: Tensor
    noise_keys: NoiseKeys


class TileChildren(NamedTuple):
    """The best children of X rows, by tile of columns."""

    scores: Tensor  # [X, tiles, k] float32
    ids: Tensor  # [X, tiles, k] int32
    peaks: Tensor  # [X, tiles] float32
    sums: Tensor  # [X, tiles] float32


def launch_best_children(
    logits_XW: Tensor,
    top_k: int,
    perturbation: Perturbation | None,
    cut: CutIds | None = None,
) -> TileChildren:
    """Find the best children in each tile, of all ranks.

    perturbation: None where all rows are greedy
    cut: the ids of the columns, where others have the rest
    """
    X, W = logits_XW.shape
    block = tile_columns_of(logits_XW, cut)
    tiles = -(-W // block)
    found = TileChildren(
        scores=logits_XW.new_empty(X, tiles, top_k),
        ids=torch.empty(X, tiles, top_k, dtype=torch.int32, device=logits_XW.device),
        peaks=logits_XW.new_empty(X, tiles),
        sums=logits_XW.new_empty(X, tiles),
    )
    noise, flags = noise_operands(logits_XW, perturbation)
    options = {"K": top_k, "BLOCK": block, "num_warps": 4} | launch_options(logits_XW) | need()
    tensors = (*found, logits_XW, *noise)
    sizes = logits_XW.stride(0), W, first_id(cut)
    _best_children_kernel[(tiles, X)](*tensors, *sizes, **flags, **options)
    return found if cut is None else _join_tiles(found, cut, block)


def noise_operands(
    logits_XW: Tensor, perturbation: Perturbation | None
) -> tuple[tuple[Tensor, ...], dict[str, int]]:
    """Give what `perturbed_scores` reads to a kernel, and its constants."""
    is_gpu = {"IS_GPU": logits_XW.is_cuda}
    if perturbation is None:
        return (logits_XW,) * 6, {"HAS_NOISE": False, "STREAM": 0, "HAS_IDS": False} | is_gpu
    keys = perturbation.noise_keys
    ids = keys.positions if keys.token_ids is None else keys.token_ids
    flags = {"HAS_NOISE": True, "STREAM": keys.stream, "HAS_IDS": keys.token_ids is not None}
    return (perturbation.floor_X, *keys[:4], ids), flags | is_gpu


def _join_tiles(found: TileChildren, cut: CutIds, ids_each: int) -> TileChildren:
    """Collect what all ranks found in their tiles of so many ids, as one GPU has it."""
    scores, ids, peaks, sums = found
    parts = [scores, ids.view(torch.float32), peaks[..., None], sums[..., None]]
    joined = cut.joined(torch.cat(parts, dim=-1), 1, ids_each)
    k = scores.shape[-1]
    scores, ids, peaks, sums = (x.contiguous() for x in joined.split([k, k, 1, 1], dim=-1))
    return TileChildren(scores, ids.view(torch.int32), peaks[..., 0], sums[..., 0])


@jit(varying=("floor_ptr", "temperature_ptr", "seeds_ptr", "positions_ptr", "epochs_ptr"))
def _best_children_kernel(
    scores_ptr,  # [X, tiles, K] float32
    ids_ptr,  # [X, tiles, K] int32
    peaks_ptr,  # [X, tiles] float32
    sums_ptr,  # [X, tiles] float32
    logits_ptr,  # [X, W] float32
    floor_ptr,  # [X] float32, with HAS_NOISE as all of the next five
    temperature_ptr,  # [X] float32
    seeds_ptr,  # [X, 2]
    positions_ptr,  # [X]
    epochs_ptr,  # [X]
    token_ids_ptr,  # [W], with HAS_IDS
    stride_logits,
    W,
    first,  # id of the first column
    K: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    STREAM: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GPU: tl.constexpr,
    PDL: tl.constexpr,
    needed_ptr=None,  # [1]; see needed.py
):
    begin(PDL)
    if needed_ptr is not None:  # noqa: SIM102  # what is compiled
        if tl.load(needed_ptr) == 0:
            return
    tile = tl.program_id(0)
    x = tl.program_id(1)
    start = first + tile * BLOCK
    column = start + tl.arange(0, BLOCK)
    inside = column < first + W
    row_ptr = logits_ptr + x.to(tl.int64) * stride_logits - first
    noise = (floor_ptr, temperature_ptr, seeds_ptr, positions_ptr, epochs_ptr, token_ids_ptr)
    score = perturbed_scores(
        *(row_ptr, x, start, column, inside, noise, HAS_NOISE, STREAM, HAS_IDS, IS_GPU)
    )
    at = x * tl.num_programs(0) + tile
    peak = tl.max(score, axis=0)
    is_some = peak > float("-inf")
    powers = tl.exp(score - tl.where(is_some, peak, 0.0))
    tl.store(peaks_ptr + at, peak)
    tl.store(sums_ptr + at, tl.sum(powers, axis=0))
    left = tl.where(inside, key_of(score, column), no_child())
    for j in range(K):
        best = tl.max(left, axis=0)
        left = tl.where(left == best, no_child(), left)
        tl.store(scores_ptr + at * K + j, score_of(best))
        tl.store(ids_ptr + at * K + j, id_of(best))


@jit
def perturbed_scores(
    row_ptr,
    x,
    start,
    column,
    inside,
    noise,
    HAS_NOISE: tl.constexpr,
    STREAM: tl.constexpr,
    HAS_IDS: tl.constexpr,
    IS_GPU: tl.constexpr,
):
    """Load logits of row x from `start` on, a multiple of 4, and add its noise; NaN is -inf.

    noise: pointers, as a kernel has them
    """
    score = tl.load(row_ptr + column, mask=inside, other=float("-inf"))
    if HAS_NOISE:
        floor_ptr, temperature_ptr, seeds_ptr, positions_ptr, epochs_ptr, token_ids_ptr = noise
        temperature = tl.load(temperature_ptr + x)
        if temperature > 0.0:
            scaled = tl.div_rn(score, tl.zeros(score.shape, tl.float32) + temperature)
            is_out = scaled < tl.load(floor_ptr + x)
            keys = (seeds_ptr, positions_ptr, epochs_ptr, token_ids_ptr)
            r = _draws(keys, start, x, column, inside, STREAM, HAS_IDS)
            score = score + temperature * gumbel_estimate(r, IS_GPU)
            score = tl.where(is_out, float("-inf"), score)
    return tl.where(score == score, score, float("-inf"))


@jit
def key_of(score, id):
    """An int64 that is greater for a greater float32 score and, of equals, for a lower id."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 equals 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - id)


@jit
def no_child():
    """The key of score -inf and an id above all."""
    return key_of(tl.zeros((), tl.float32) - float("inf"), 1 << 30)


@jit
def score_of(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def id_of(key):
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)
