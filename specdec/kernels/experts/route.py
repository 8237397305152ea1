"""Which experts each row takes: the k largest of its logits, and their weights.

weight = exp(z - max) / total, the total over all experts or over the chosen ones. Ties go to the
lowest id; slots are in falling order. A row of padding chooses the expert E, which is none, with
weights 0, so that no expert is read for it and nothing is added to it.

Where several GPUs have a range of experts each, all choose alike: ids count those of this one's
range, others are none, and places say which GPU has the result of each slot.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.invariant import blocked_exp, tree_sum
from specdec.kernels.linear import Sums
from specdec.kernels.norms import finished
from specdec.kernels.overlap import begin


class Routing(NamedTuple):
    """What each row chose."""

    ids_TS: Tensor  # [T, k] int32, slots in falling order; E: padding
    weights_TS: Tensor  # [T, k] float32; 0: padding
    places_TS: Tensor | None = None  # [T, k] int32: GPU * k + slot; 0 + slot: padding


def route(
    logits: Sums,
    num_chosen: int,
    is_renormalized: bool,
    slots_T: Tensor | None = None,
    rows_T: Tensor | None = None,
    held: range | None = None,
) -> Routing:
    """Choose `num_chosen` experts for each row.

    logits:          unrounded float32 [T, E]
    is_renormalized: weights of a row add up to 1; if not, a softmax over all experts gives them
    slots_T:         cache slots, -1: a row of padding; None: there is none
    rows_T:          which of the slots the rows have, where these are some rows of a pass; numbers
                     that are no row are padding
    held:            the experts of this GPU, where each has as many; ids then count from its first,
                     and len(held) is none. None: all
    """
    splits, T, E = logits.parts_STN.shape
    if not 0 < num_chosen <= E:
        raise ValueError(f"{num_chosen} experts a row, of {E}")
    assert logits.parts_STN.dtype == torch.float32, logits.parts_STN.dtype
    assert rows_T is None or slots_T is not None, "rows are rows of slots"
    if not use_triton(logits.parts_STN):
        return route_ref(logits, num_chosen, is_renormalized, slots_T, rows_T, held)
    ids_TS = logits.parts_STN.new_empty(T, num_chosen, dtype=torch.int32)
    weights_TS = logits.parts_STN.new_empty(T, num_chosen)
    bias = weights_TS if logits.bias_N is None else logits.bias_N
    slots = ids_TS if slots_T is None else slots_T
    rows = ids_TS if rows_T is None else rows_T
    places_TS = None if held is None else torch.empty_like(ids_TS)
    part = {} if held is None else {"FIRST": held.start, "HELD": len(held), "places_ptr": places_TS}
    flags = {"IS_RENORMALIZED": is_renormalized, "HAS_BIAS": logits.bias_N is not None}
    flags |= {"HAS_SLOTS": slots_T is not None, "HAS_ROWS": rows_T is not None}
    sizes = {"SPLITS": splits, "K": num_chosen, "BLOCK_K": next_power_of_2(num_chosen)}
    options = {"BLOCK_E": next_power_of_2(E), "num_warps": 1} | launch_options(weights_TS)
    tensors = (ids_TS, weights_TS, logits.parts_STN, bias, slots, rows)
    _route_kernel[(T,)](*tensors, T, len(slots), E, **flags, **sizes, **options, **part)
    return Routing(ids_TS, weights_TS, places_TS)


@jit(varying=("T", "num_slots"))
def _route_kernel(
    ids_ptr,  # [T, K]
    weights_ptr,  # [T, K]
    parts_ptr,  # [SPLITS, T, E]
    bias_ptr,  # [E]
    slots_ptr,  # [num_slots], with HAS_SLOTS
    rows_ptr,  # [T], with HAS_ROWS
    T,
    num_slots,
    E,
    IS_RENORMALIZED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
    FIRST: tl.constexpr = 0,
    HELD: tl.constexpr = 0,
    places_ptr=None,  # [T, K], of experts on several GPUs
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    NOT_TO_CHOOSE: tl.constexpr = -(2**31)  # less than any key
    e = tl.arange(0, BLOCK_E)
    s = tl.arange(0, BLOCK_K)
    z = finished(parts_ptr, bias_ptr, t, e, T, E, HAS_BIAS, SPLITS)
    keys = tl.where(e < E, tl.maximum(_key(z), NOT_TO_CHOOSE + 1), NOT_TO_CHOOSE)
    ids = tl.zeros([BLOCK_K], tl.int32)
    chosen = tl.full([BLOCK_K], float("-inf"), tl.float32)
    for i in tl.static_range(K):
        best = tl.max(keys, axis=0)
        expert = tl.min(tl.where(keys == best, e, BLOCK_E), axis=0)
        keys = tl.where(e == expert, NOT_TO_CHOOSE, keys)
        ids = tl.where(s == i, expert, ids)
        chosen = tl.where(s == i, _value(best), chosen)
    highest = tl.max(chosen, axis=0)
    powers = tl.exp(chosen - highest)
    if IS_RENORMALIZED:
        total = tl.sum(powers, axis=0)
    else:
        total = tl.sum(tl.where(e < E, tl.exp(z - highest), 0.0), axis=0)
    weights = powers / total
    if HAS_SLOTS:
        row = t
        if HAS_ROWS:
            row = tl.load(rows_ptr + t).to(tl.int64)
        is_row = (row >= 0) & (row < num_slots)
        is_row = is_row & (tl.load(slots_ptr + row, mask=is_row, other=-1) >= 0)
        ids = tl.where(is_row, ids, E)
        weights = tl.where(is_row, weights, 0.0)
    if places_ptr is not None:
        places = tl.where(ids < E, ids // HELD, 0) * K + s
        tl.store(places_ptr + t * K + s, places, mask=s < K)
        ids = tl.where((ids >= FIRST) & (ids < FIRST + HELD), ids - FIRST, HELD)
    tl.store(ids_ptr + t * K + s, ids, mask=s < K)
    tl.store(weights_ptr + t * K + s, weights, mask=s < K)


@jit
def _key(z):
    """Make an integer that has the order of z; GPUs find the largest of 32 integers at once."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
    bits = tl.where(z != z, 0x7FC00000, bits)  # NaN is the largest, whatever its sign
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _value(key):
    """Return the z of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


def route_ref(
    logits: Sums,
    num_chosen: int,
    is_renormalized: bool,
    slots_T: Tensor | None,
    rows_T: Tensor | None,
    held: range | None = None,
) -> Routing:
    z_TE = logits.finish(torch.float32)
    E = z_TE.shape[1]
    sorted_TE, ids_TE = z_TE.sort(dim=1, descending=True, stable=True)
    ids_TS = ids_TE[:, :num_chosen].int()
    powers_TE = blocked_exp(sorted_TE - sorted_TE[:, :1])
    powers_TS = powers_TE[:, :num_chosen]
    total_T1 = tree_sum(powers_TS if is_renormalized else powers_TE)
    weights_TS = powers_TS / total_T1
    if slots_T is None:
        return _held(ids_TS, weights_TS, E, held)
    if rows_T is not None:
        is_row_T = (rows_T >= 0) & (rows_T < len(slots_T))
        slots_T = slots_T[rows_T.clamp(0, len(slots_T) - 1)].where(is_row_T, -1)
    is_row_T1 = (slots_T >= 0)[:, None]
    return _held(ids_TS.where(is_row_T1, E), weights_TS.where(is_row_T1, 0.0), E, held)


def _held(ids_TS: Tensor, weights_TS: Tensor, E: int, held: range | None) -> Routing:
    if held is None:
        return Routing(ids_TS, weights_TS)
    k = ids_TS.shape[1]
    slot_S = torch.arange(k, dtype=torch.int32, device=ids_TS.device)
    places_TS = (ids_TS // len(held)).where(ids_TS < E, 0) * k + slot_S
    is_held_TS = (ids_TS >= held.start) & (ids_TS < held.stop)
    return Routing((ids_TS - held.start).where(is_held_TS, len(held)), weights_TS, places_TS)
