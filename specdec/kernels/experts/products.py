"""Both products of the experts: a program multiplies a tile of one expert's W by its rows.

For few rows nothing is sorted: a program looks all ids up, finds the j-th expert that has a row,
and takes all rows as columns; those of other experts are not read and not written. For more rows
group.py has sorted the pairs of row and slot, and a tile's columns are some of one expert. Results
of the first product lie by pair, so that both products gather x alike.
"""

from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl
from specdec.kernels.experts.group import group
from specdec.kernels.experts.tiles import ExpertTiles, expert_tiles
from specdec.kernels.kept import store_kept
from specdec.kernels.linear import describe
from specdec.kernels.needed import need
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs
from specdec.kernels.tile_shapes import Shape, row_class
from specdec.kernels.tiles import place_of


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
        tiles = expert_tiles(row_class(T), k, gate_up_EXD.shape, down_EDI.shape, x_TD.dtype)
    assert tiles.is_sorted or tiles.gate_up.block_m >= T, (T, tiles)
    pairs = group(ids_TS, E, tiles.gate_up.block_m) if tiles.is_sorted else (ids_TS, None)
    h_PI, y_STD = x_TD.new_empty(T * k, I), x_TD.new_empty(k, T, D)
    _launch(h_PI, x_TD, gate_up_EXD, pairs, ids_TS, tiles.gate_up, is_gated=True)
    _launch(y_STD, h_PI, down_EDI, pairs, ids_TS, tiles.down, is_gated=False)
    return y_STD


def _launch(
    out: Tensor,
    x_XK: Tensor,
    weight_ENK: Tensor,
    pairs: tuple[Tensor, Tensor | None],
    ids_TS: Tensor,
    shape: Shape,
    is_gated: bool,
) -> None:
    """x: rows, or with is_gated false pairs. pairs: `Groups`, or the ids alone."""
    (T, k), (E, N, K) = ids_TS.shape, weight_ENK.shape
    N //= 2 if is_gated else 1
    pair_P, tiles_M3 = pairs
    has_tiles = tiles_M3 is not None
    num_tiles = min(E, T * k) if tiles_M3 is None else len(tiles_M3)
    w_desc = describe(weight_ENK.flatten(0, 1), shape.block_n, shape.block_k)
    flags = {"IS_GATED": is_gated, "HAS_TILES": has_tiles, "IS_WHOLE": K % shape.block_k == 0}
    blocks = {"BLOCK_M": shape.block_m, "BLOCK_E": next_power_of_2(E + 1)}
    blocks |= {"BLOCK_P": next_power_of_2(shape.block_m * k)}  # few rows are no more
    options = {"num_stages": shape.num_stages, "num_warps": shape.num_warps}
    _expert_kernel[(num_tiles * -(-N // shape.block_n),)](
        *(out, x_XK, w_desc, pair_P, pair_P if tiles_M3 is None else tiles_M3),
        *(num_tiles, T, x_XK.stride(0), N, K, E),
        **{"SLOTS": k} | flags | blocks | options | launch_options(x_XK) | need(),
    )


@jit(varying=("num_tiles", "T"))
def _expert_kernel(
    out_ptr,  # gated: [P, N]; else [SLOTS, T, N]
    x_ptr,  # gated: [T, K]; else [P, K]
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
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
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
        expert, pair, is_own = _of_tile(pair_ptr, tiles_ptr + tile * 3, BLOCK_M)
    else:
        n_tile = tl.program_id(0) % n_tiles
        j = tl.program_id(0) // n_tiles
        expert = _nth_expert(pair_ptr, T * SLOTS, j, E, BLOCK_E, BLOCK_P)
        pair, is_own = _of_rows(pair_ptr, T, expert, SLOTS, BLOCK_M)
    if not IS_GATED:  # ids, and what group.py made of them, were there before the product of gates
        wait_for_inputs(PDL)
    if needed_ptr is not None:  # noqa: SIM102  # what is compiled
        if tl.load(needed_ptr) == 0:
            return
    if expert < 0:
        return
    n0 = n_tile * BLOCK_N
    row = expert * N * (2 if IS_GATED else 1) + n0
    k = tl.arange(0, BLOCK_K)
    x_row = pair // SLOTS if IS_GATED else pair
    x_at = x_ptr + x_row.to(tl.int64)[:, None] * stride_x + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = total
    for i in range(tl.cdiv(K, BLOCK_K)):
        inside = is_own[:, None]
        if not IS_WHOLE:
            inside = inside & (k + i * BLOCK_K < K)[None, :]
        x = tl.trans(tl.load(x_at + i * BLOCK_K, mask=inside, other=0.0))
        total = tl.dot(w_desc.load([row, i * BLOCK_K]), x, total, input_precision="ieee")
        if IS_GATED:
            up = tl.dot(w_desc.load([row + N, i * BLOCK_K]), x, up, input_precision="ieee")
    let_the_next_start(PDL)
    if IS_GATED:
        total = total / (1.0 + tl.exp(-total)) * up
        out_row = pair
    else:
        out_row = pair % SLOTS * T + pair // SLOTS
    n = n0 + tl.arange(0, BLOCK_N)
    out = out_ptr + out_row.to(tl.int64)[None, :] * N + n[:, None]
    store_kept(out, total.to(out_ptr.dtype.element_ty), (n < N)[:, None] & is_own[None, :])


@jit
def _of_tile(pair_ptr, tile_ptr, BLOCK_M: tl.constexpr):
    """Return a tile's expert, -1 if there is no such tile, its pairs, and which of them it has."""
    first = tl.load(tile_ptr + 1, cache_modifier=".cg")
    last = tl.load(tile_ptr + 2, cache_modifier=".cg")
    expert = tl.where(first < last, tl.load(tile_ptr, cache_modifier=".cg"), -1)
    place = first + tl.arange(0, BLOCK_M)
    is_own = place < last
    return expert, tl.load(pair_ptr + place, mask=is_own, other=0, cache_modifier=".cg"), is_own


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
def _of_rows(ids_ptr, T, expert, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the pair of each row that has this expert, and which rows do; it is in one slot."""
    t = tl.arange(0, BLOCK_M)
    slot = tl.full([BLOCK_M], -1, tl.int32)
    for s in tl.static_range(SLOTS):
        ids = tl.load(ids_ptr + t * SLOTS + s, mask=t < T, other=-1, cache_modifier=".cg")
        slot = tl.where(ids == expert, s, slot)
    is_own = (slot >= 0) & (t < T)
    return tl.where(is_own, t * SLOTS + slot, 0), is_own
