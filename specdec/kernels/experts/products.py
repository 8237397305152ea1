"""Both products of the experts: a program multiplies a tile of one expert's W by its rows.

For few rows nothing is sorted: a program looks all ids up, finds the j-th expert that has a row,
and takes all rows as columns; those of other experts are not read and not written. For more rows
group.py has sorted the pairs of row and slot, and a tile's columns are some of one expert. Results
of the first product lie by pair, so that both products gather x alike; or by place, as x may, and
then a tile's rows of x lie one after another, and after them others, whose columns are not written.
Shapes with cuts are for persistent/, which reads x by place only.
"""

from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl
from specdec.kernels.experts.copied import copy_rows
from specdec.kernels.experts.group import Groups, group
from specdec.kernels.experts.tiles import COMPUTING_ROWS, ExpertTiles, expert_tiles
from specdec.kernels.kept import store_kept
from specdec.kernels.linear import describe
from specdec.kernels.needed import need
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs
from specdec.kernels.persistent.launch import Experts, launch_persistent
from specdec.kernels.tile_shapes import row_pieces
from specdec.kernels.tiles import cut, place_of


def launch_expert_parts(
    x_TD: Tensor,
    ids_TS: Tensor,
    gate_up_EXD: Tensor,
    down_EDI: Tensor,
    tiles: ExpertTiles | None = None,
) -> Tensor:
    """Leave [k, T, D]. tiles: None: the rule's, as everywhere but in tuning and tests."""
    (T, k), (E, D, I) = ids_TS.shape, down_EDI.shape
    assert x_TD.stride(1) == 1, x_TD.stride()
    assert ids_TS.is_contiguous(), ids_TS.stride()
    if tiles is None:
        weights = gate_up_EXD.shape, down_EDI.shape
        tiles = expert_tiles(T, k, *weights, x_TD.dtype)
    by_place = tiles.h_by_place or tiles.x_by_place
    assert tiles.is_sorted or (tiles.gate_up.block_m >= T and not by_place), (T, tiles)
    groups = group(ids_TS, E, tiles.gate_up.block_m) if tiles.is_sorted else None
    if tiles.x_by_place:
        assert groups is not None, tiles
        x_TD = copy_rows(x_TD, groups.place_P)
    h_PI, y_STD = x_TD.new_empty(T * k, I), x_TD.new_empty(k, T, D)
    _launch(h_PI, x_TD, gate_up_EXD, groups, ids_TS, tiles, is_gated=True)
    _launch(y_STD, h_PI, down_EDI, groups, ids_TS, tiles, is_gated=False)
    return y_STD


def _launch(
    out: Tensor,
    x_XK: Tensor,
    weight_ENK: Tensor,
    groups: Groups | None,
    ids_TS: Tensor,
    tiles: ExpertTiles,
    is_gated: bool,
) -> None:
    """x: rows, or with is_gated false pairs; or either by place. groups: None: not sorted."""
    (T, k), (E, N, K) = ids_TS.shape, weight_ENK.shape
    N //= 2 if is_gated else 1
    shape, is_placed = tiles[:2][not is_gated], tiles.x_by_place if is_gated else tiles.h_by_place
    if shape.cuts != 0:
        assert is_placed, tiles
        assert groups is not None, tiles
        slots, (pair_P, tiles_M3, _, count_1) = 0 if is_gated else k, groups
        experts = Experts(weight_ENK.shape[1], slots, tiles_M3, count_1, pair_P)
        args = out.view(1, T * k, N), x_XK, weight_ENK.flatten(0, 1), None, cut(shape, T, 1)
        return launch_persistent(*args, is_gated, experts)
    pair_P, tiles_M3 = (ids_TS, ids_TS) if groups is None else groups[:2]
    num_tiles = min(E, T * k) if groups is None else len(tiles_M3)
    w_desc = describe(weight_ENK.flatten(0, 1), shape.block_n, shape.block_k)
    block_m, tail = row_pieces(shape.block_m)
    rows = [
        describe(x_XK, n, shape.block_k) if is_placed else x_XK for n in (block_m, tail or block_m)
    ]
    flags = {"IS_GATED": is_gated, "HAS_TILES": groups is not None}
    flags |= {"IS_WHOLE": K % shape.block_k == 0, "IS_KEPT": shape.block_m < COMPUTING_ROWS}
    flags |= {"X_BY_PLACE": is_placed, "H_BY_PLACE": tiles.h_by_place}
    blocks = {"BLOCK_M": block_m, "TAIL": tail, "BLOCK_E": next_power_of_2(E + 1)}
    blocks |= {"BLOCK_P": next_power_of_2(shape.block_m * k), "BLOCK_S": next_power_of_2(k)}
    options = {"num_stages": shape.num_stages, "num_warps": shape.num_warps}
    _expert_kernel[(num_tiles * -(-N // shape.block_n),)](
        *(out, *rows, w_desc, pair_P, tiles_M3),
        *(num_tiles, T, x_XK.stride(0), N, K, E),
        **{"SLOTS": k} | flags | blocks | options | launch_options(x_XK) | need(),
    )


@jit(varying=("num_tiles", "T"))
def _expert_kernel(
    out_ptr,  # gated: [P, N]; else [SLOTS, T, N]
    x_rows,  # gated: [T, K]; else [P, K]; by place: [P, K] in tiles [BLOCK_M, BLOCK_K]
    rest_rows,  # the same, but tiles [TAIL, BLOCK_K]
    w_desc,  # [E N, K], gated [E 2N, K], in tiles [BLOCK_N, BLOCK_K]
    pair_ptr,  # [P], by place; without tiles the ids of pairs
    tiles_ptr,  # [num_tiles, 3], with HAS_TILES
    num_tiles,
    T,
    stride_x,
    N,
    K,
    E,
    SLOTS: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_TILES: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # K is in whole tiles
    IS_KEPT: tl.constexpr,  # results are few enough for the L2 cache
    X_BY_PLACE: tl.constexpr,
    H_BY_PLACE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL: tl.constexpr,  # more rows of a sorted tile, after BLOCK_M
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
    needed_ptr=None,  # [1]; see needed.py
):
    BLOCK_N: tl.constexpr = w_desc.block_shape[0]
    BLOCK_K: tl.constexpr = w_desc.block_shape[1]
    if IS_GATED:
        wait_for_inputs(PDL)
    n_tiles = tl.cdiv(N, BLOCK_N)
    if HAS_TILES:
        n_tile, tile = place_of(tl.program_id(0), n_tiles, num_tiles)
        expert, first, last = _of_tile(tiles_ptr + tile * 3)
        pair = _pairs(pair_ptr, first, last, BLOCK_M)
    else:
        n_tile = tl.program_id(0) % n_tiles
        j = tl.program_id(0) // n_tiles
        ids = _ids_of_rows(pair_ptr, T, SLOTS, BLOCK_M, BLOCK_S)
        if T == 1:  # its experts differ
            expert = tl.load(pair_ptr + j, cache_modifier=".cg")
            expert = tl.where(expert < E, expert, -1)
        else:
            expert = _nth_expert(pair_ptr, T * SLOTS, j, E, BLOCK_E, BLOCK_P)
        pair = _pairs_of_rows(ids, expert, SLOTS)
        first = 0
    if not IS_GATED:  # ids, and what group.py made of them, were there before the product of gates
        wait_for_inputs(PDL)
    if needed_ptr is not None:  # noqa: SIM102  # what is compiled
        if tl.load(needed_ptr) == 0:
            return
    if expert < 0:
        return
    n0 = n_tile * BLOCK_N
    row = expert * N * (2 if IS_GATED else 1) + n0
    x_at = _rows_at(x_rows, pair, stride_x, SLOTS, IS_GATED, X_BY_PLACE)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = total
    if TAIL > 0:
        pair_rest = _pairs(pair_ptr, first + BLOCK_M, last, TAIL)
        rest_at = _rows_at(rest_rows, pair_rest, stride_x, SLOTS, IS_GATED, X_BY_PLACE)
        rest = tl.zeros((BLOCK_N, TAIL), tl.float32)
        up_rest = rest
    for i in range(tl.cdiv(K, BLOCK_K)):
        k = i * BLOCK_K
        w = w_desc.load([row, k])
        x = _columns(x_rows, x_at, pair, first, k, K, BLOCK_K, IS_WHOLE, X_BY_PLACE)
        total = tl.dot(w, x, total, input_precision="ieee")
        if TAIL > 0:
            x_rest = _columns(
                *(rest_rows, rest_at, pair_rest, first + BLOCK_M, k, K),
                *(BLOCK_K, IS_WHOLE, X_BY_PLACE),
            )
            rest = tl.dot(w, x_rest, rest, input_precision="ieee")
        if IS_GATED:
            w_up = w_desc.load([row + N, k])
            up = tl.dot(w_up, x, up, input_precision="ieee")
            if TAIL > 0:
                up_rest = tl.dot(w_up, x_rest, up_rest, input_precision="ieee")
    let_the_next_start(PDL)
    if IS_GATED and H_BY_PLACE:
        pair = _places(first, last, BLOCK_M)
        if TAIL > 0:
            pair_rest = _places(first + BLOCK_M, last, TAIL)
    _store(out_ptr, total, up, pair, n0, N, T, SLOTS, IS_GATED, IS_KEPT)
    if TAIL > 0:
        _store(out_ptr, rest, up_rest, pair_rest, n0, N, T, SLOTS, IS_GATED, IS_KEPT)


@jit
def _rows_at(
    rows, pair, stride_x, SLOTS: tl.constexpr, IS_GATED: tl.constexpr, BY_PLACE: tl.constexpr
):
    """Return where the rows of pairs begin, if the copy engine does not read them by place."""
    if BY_PLACE:
        return pair
    else:
        row = pair // SLOTS if IS_GATED else pair
        return rows + row.to(tl.int64) * stride_x


@jit
def _columns(
    rows,
    x_at,
    pair,
    first,
    k0,
    K,
    BLOCK_K: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BY_PLACE: tl.constexpr,
):
    """Load some of K of rows, as columns; where there is no pair, zeros, or by place any row."""
    if BY_PLACE:
        x = rows.load([first, k0])
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        inside = (pair >= 0)[:, None]
        if not IS_WHOLE:
            inside = inside & (k < K)[None, :]
        x = tl.load(x_at[:, None] + k[None, :], mask=inside, other=0.0)
    return tl.trans(x)


@jit
def _store(
    out_ptr,
    total,
    up,
    pair,
    n0,
    N,
    T,
    SLOTS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_KEPT: tl.constexpr,
):
    """Apply silu if gated, round once, and store by what `pair` has, or by slot and row."""
    if IS_GATED:
        total = total / (1.0 + tl.exp(-total)) * up
        row = pair
    else:
        row = pair % SLOTS * T + pair // SLOTS
    n = n0 + tl.arange(0, total.shape[0])
    out = out_ptr + row.to(tl.int64)[None, :] * N + n[:, None]
    inside = (n < N)[:, None] & (pair >= 0)[None, :]
    y = total.to(out_ptr.dtype.element_ty)
    if IS_KEPT:
        store_kept(out, y, inside)
    else:
        tl.store(out, y, mask=inside)


@jit
def _of_tile(tile_ptr):
    """Return a tile's expert, -1 if it has no places, the first of these, and where they end."""
    first = tl.load(tile_ptr + 1, cache_modifier=".cg")
    last = tl.load(tile_ptr + 2, cache_modifier=".cg")
    expert = tl.load(tile_ptr, cache_modifier=".cg")
    return tl.where(first < last, expert, -1), first, last


@jit
def _pairs(pair_ptr, first, last, COUNT: tl.constexpr):
    """Return the pairs at places from the first on, -1 from the last on."""
    place = first + tl.arange(0, COUNT)
    return tl.load(pair_ptr + place, mask=place < last, other=-1, cache_modifier=".cg")


@jit
def _places(first, last, COUNT: tl.constexpr):
    """Return places from the first on, -1 from the last on."""
    place = first + tl.arange(0, COUNT)
    return tl.where(place < last, place, -1)


@jit
def _nth_expert(ids_ptr, P, j, E, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return the j-th expert that has a pair, from 0 on, or -1."""
    p = tl.arange(0, BLOCK_P)
    e = tl.arange(0, BLOCK_E)
    ids = tl.load(ids_ptr + p, mask=p < P, other=E, cache_modifier=".cg")
    is_hit = (tl.histogram(ids, BLOCK_E) > 0) & (e < E)
    is_nth = is_hit & (tl.cumsum(is_hit.to(tl.int32), axis=0) == j + 1)
    return tl.max(tl.where(is_nth, e, -1), axis=0)


@jit
def _ids_of_rows(ids_ptr, T, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr):
    """Load the ids of rows; beyond the last row and slot they are -2."""
    t = tl.arange(0, BLOCK_M)[:, None]
    s = tl.arange(0, BLOCK_S)[None, :]
    inside = (t < T) & (s < SLOTS)
    return tl.load(ids_ptr + t * SLOTS + s, mask=inside, other=-2, cache_modifier=".cg")


@jit
def _pairs_of_rows(ids, expert, SLOTS: tl.constexpr):
    """Return the pair of each row that has this expert, which is in one slot; else -1."""
    t = tl.arange(0, ids.shape[0])[:, None]
    s = tl.arange(0, ids.shape[1])[None, :]
    return tl.max(tl.where(ids == expert, t * SLOTS + s, -1), axis=1)
