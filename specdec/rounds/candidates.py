"""The best tokens of the rows that propose, one of which becomes the draft.

What the token before a draft adds to their scores (a markov head, a selector) depends on the draft
before; which tokens come into question does not, so those of all rows are found at once. Ids are
dealt out to lanes, id i to lane i % LANES, and the best of each lane is a candidate. So the best
token always is one, and nearly all that come next: the tenth of 150,000 shares its lane with a
better one in a row of 450. Tiles of neighbours, where frequent tokens crowd, would have to keep
several each, as for children of trees. A vocabulary of up to LANES ids keeps all.

A markov head adds to all candidates, a selector to the best few of them.

Letters: X rows, B requests, k candidates that a selector sees, r rank, W draft vocabulary, L lanes,
S parts of the vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.best_children import (
    Perturbation,
    id_of,
    key_of,
    no_child,
    noise_operands,
    perturbed_scores,
    score_of,
)
from specdec.kernels.best_token import TileMaxima
from specdec.kernels.choose_token import noise_ref
from specdec.kernels.overlap import begin
from specdec.rounds.rank import best, keys_of, perturbed

LANES = 4096
PROGRAMS = 64  # find the best of lanes of few rows, each in a part of the vocabulary
LANES_EACH = 32  # of a program that adds to their scores


def lanes_ref(logits_XW: Tensor, noise: Perturbation | None) -> Tensor:
    """Compute logits + temperature * noise [X, W] float32: -inf where a lane has a better one.

    noise: of each row; None where all are greedy
    """
    score_XW = logits_XW
    if noise is not None:
        floor_X, keys = noise
        noise_XW = noise_ref(keys, logits_XW.shape[1])
        score_XW = perturbed(logits_XW, floor_X, keys.temperatures, noise_XW)
    W = score_XW.shape[1]
    key_XnL = keys_of(F.pad(score_XW, (0, -W % LANES), value=-torch.inf)).unflatten(1, (-1, LANES))
    is_best_XW = (key_XnL == key_XnL.amax(1, keepdim=True)).flatten(1)[:, :W]
    return torch.where(is_best_XW & ~score_XW.isnan(), score_XW, -torch.inf)


def launch_lanes(logits_XW: Tensor, noise: Perturbation | None) -> Tensor:
    """Find the candidates as keys [X, S, L] int64 (best_children.py), of each part the best."""
    X, W = logits_XW.shape
    turns = -(-W // LANES)
    each = -(-turns // max(min(PROGRAMS // X, turns), 1))
    S = -(-turns // each)
    keys_XSL = torch.empty(X, S, LANES, dtype=torch.int64, device=logits_XW.device)
    operands, flags = noise_operands(logits_XW, noise)
    given = *operands, logits_XW.stride(0), W, each
    options = {"LANES": LANES, "num_warps": 8} | launch_options(logits_XW)
    _lanes_kernel[(S, X)](keys_XSL, logits_XW, *given, **flags, **options)
    return keys_XSL


def launch_markov_maxima(
    keys_BSL: Tensor, feature_Br: Tensor, after_Wr: Tensor, has_sums: bool
) -> TileMaxima:
    """Add <feature, after[candidate]> to scores, and reduce them by tiles of lanes.

    A score that is no number becomes -inf: padding's rows may hold anything.
    """
    (B, S, L), (W, r) = keys_BSL.shape, after_Wr.shape
    assert feature_Br.stride(1) == 1, feature_Br.stride()
    best_tB = torch.empty(L // LANES_EACH, B, dtype=torch.float32, device=keys_BSL.device)
    ids_tB = torch.empty_like(best_tB, dtype=torch.int32)
    sums_tB = torch.empty_like(best_tB) if has_sums else best_tB
    _markov_maxima_kernel[(L // LANES_EACH, B)](
        *(best_tB, ids_tB, sums_tB, keys_BSL, feature_Br, after_Wr),
        *(S, W, r, feature_Br.stride(0)),
        HAS_SUMS=has_sums,
        BLOCK=LANES_EACH,
        WIDTH=next_power_of_2(r),
        num_warps=8,
        **launch_options(after_Wr),
    )
    return TileMaxima(best_tB, ids_tB, sums_tB if has_sums else None)


def best_candidates(
    logits_XW: Tensor, count: int, noise: Perturbation | None
) -> tuple[Tensor, Tensor]:
    """Find the greatest logits + temperature * noise: scores float32 and ids int32 [k, X].

    The best come first, of equals the lowest id; NaN is -inf. Ids of -inf may be anything.

    noise: of each row; None where all are greedy
    """
    if not use_triton(logits_XW):
        score_XW = lanes_ref(logits_XW, noise)
        place_Xk = best(score_XW, count)
        return score_XW.gather(1, place_Xk).t().contiguous(), place_Xk.t().int().contiguous()
    keys_XSL = launch_lanes(logits_XW, noise)
    X, S, L = keys_XSL.shape
    scores_kX = logits_XW.new_empty(count, X)
    ids_kX = torch.empty(count, X, dtype=torch.int32, device=logits_XW.device)
    options = {"K": count, "LANES": L, "num_warps": 8} | launch_options(logits_XW)
    _best_of_lanes_kernel[(X,)](scores_kX, ids_kX, keys_XSL, S, **options)
    return scores_kX, ids_kX


@jit(varying=("floor_ptr", "temperature_ptr", "seeds_ptr", "positions_ptr", "epochs_ptr", "each"))
def _lanes_kernel(
    keys_ptr,  # [X, S, LANES] int64
    logits_ptr,  # [X, W] float32
    floor_ptr,  # as in best_children.py, as all of the next five
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    epochs_ptr,
    token_ids_ptr,
    stride_logits,
    W,
    each,  # ids of a lane that a program compares
    HAS_NOISE: tl.constexpr,
    STREAM: tl.constexpr,
    HAS_IDS: tl.constexpr,
    IS_GPU: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    s = tl.program_id(0)
    x = tl.program_id(1)
    lane = tl.arange(0, LANES)
    row_ptr = logits_ptr + x.to(tl.int64) * stride_logits
    noise = (floor_ptr, temperature_ptr, seeds_ptr, positions_ptr, epochs_ptr, token_ids_ptr)
    found = tl.full((LANES,), 0, tl.int64) + no_child()
    for i in range(each):
        start = (s * each + i) * LANES
        id = start + lane
        inside = id < W
        score = perturbed_scores(
            *(row_ptr, x, start, id, inside, noise, HAS_NOISE, STREAM, HAS_IDS, IS_GPU)
        )
        found = tl.maximum(found, tl.where(inside, key_of(score, id), no_child()))
    tl.store(keys_ptr + (x.to(tl.int64) * tl.num_programs(0) + s) * LANES + lane, found)


@jit(varying=("S",))
def _best_of_lanes_kernel(
    scores_ptr,  # [K, X] float32
    ids_ptr,  # [K, X] int32
    keys_ptr,  # [X, S, LANES] int64
    S,
    K: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    x = tl.program_id(0)
    at = keys_ptr + x.to(tl.int64) * S * LANES + tl.arange(0, LANES)
    left = tl.load(at)
    for s in range(1, S):
        left = tl.maximum(left, tl.load(at + s * LANES))
    for k in range(K):
        top = tl.max(left, axis=0)
        left = tl.where(left == top, no_child(), left)
        tl.store(scores_ptr + k * tl.num_programs(0) + x, score_of(top))
        tl.store(ids_ptr + k * tl.num_programs(0) + x, id_of(top))


@jit(varying=("keys_ptr", "S"))
def _markov_maxima_kernel(
    best_ptr,  # [tiles, B] float32
    ids_ptr,  # [tiles, B] int32
    sums_ptr,  # [tiles, B] float32, with HAS_SUMS
    keys_ptr,  # [B, S, L] int64
    feature_ptr,  # [B, r]
    after_ptr,  # [W, r]
    S,
    W,
    r,
    stride_feature,
    HAS_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    tile = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    L = tl.num_programs(0) * BLOCK
    at = keys_ptr + b * S * L + tile * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(at)
    for s in range(1, S):
        key = tl.maximum(key, tl.load(at + s * L))
    id = id_of(key)
    i = tl.arange(0, WIDTH)
    feature = tl.load(feature_ptr + b * stride_feature + i, mask=i < r, other=0.0).to(tl.float32)
    is_read = (id < W)[:, None] & (i < r)[None, :]
    after_at = after_ptr + id.to(tl.int64)[:, None] * r + i[None, :]
    after = tl.load(after_at, mask=is_read, other=0.0).to(tl.float32)
    score = score_of(key) + tl.sum(feature[None, :] * after, axis=1)
    score = tl.where(score == score, score, float("-inf"))
    top = tl.max(score, axis=0)
    out = tile * tl.num_programs(1) + b
    tl.store(best_ptr + out, top)
    tl.store(ids_ptr + out, tl.min(tl.where(score == top, id, 1 << 30), axis=0))
    if HAS_SUMS:
        powers = tl.exp(score - tl.where(top > float("-inf"), top, 0.0))
        tl.store(sums_ptr + out, tl.sum(powers, axis=0))


def of_all_ids(scores_kX: Tensor, ids_kX: Tensor, W: int) -> Tensor:
    """Lay out scores by id [X, W]: -inf where there is no candidate.

    ids: those of scores -inf may be anything
    """
    logits_XW = scores_kX.new_full((scores_kX.shape[1], W), -torch.inf)
    ids_Xk = ids_kX.t().long().clamp(0, W - 1)
    return logits_XW.scatter_reduce_(1, ids_Xk, scores_kX.t(), "amax")
