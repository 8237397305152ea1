"""Both products of the experts: a program multiplies a tile of one expert's W by its rows.

For few rows nothing is sorted: a program looks all ids up, finds the j-th expert that has a row,
and takes all rows as columns; those of other experts are not read and not written. For more rows
group.py has sorted the pairs of row and slot, and a tile's columns are some of one expert. Results
of the first product lie by pair, so that both products gather x alike.
"""

from collections.abc import Mapping

from torch import Tensor

from specdec.kernels import INTERPRET, jit, launch_options, next_power_of_2, tl
from specdec.kernels.experts.fp8 import fp8_sums
from specdec.kernels.experts.group import group
from specdec.kernels.experts.mxfp4 import ROWS, ROWS_OF_WORDS, WORDS, finished, load_packed
from specdec.kernels.experts.pairs import (
    columns_of,
    ids_of_rows,
    nth_expert,
    of_tile,
    pairs_at,
    pairs_of_rows,
    rows_at,
)
from specdec.kernels.experts.tiles import COMPUTING_ROWS, ExpertTiles, expert_tiles
from specdec.kernels.experts.weight import Weight
from specdec.kernels.fp8.quantise import launch_quantise
from specdec.kernels.fp8.weight import Fp8Rows
from specdec.kernels.kept import store_kept
from specdec.kernels.linear import describe
from specdec.kernels.needed import need
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs
from specdec.kernels.tile_shapes import Shape, row_pieces
from specdec.kernels.tiles import place_of


def launch_expert_parts(
    x_TD: Tensor,
    ids_TS: Tensor,
    gate_up: Weight,
    down: Weight,
    clamp: tuple[float, float] | None = None,
    tiles: ExpertTiles | None = None,
    codes: Fp8Rows | None = None,
) -> Tensor:
    """Leave [k, T, D].

    tiles: None: the rule's, as everywhere but in tuning and tests
    codes: of x; None: they are made here, where the weights have 8 bits
    """
    (T, k), D = ids_TS.shape, x_TD.shape[1]
    E, I = gate_up.num_experts, gate_up.num_rows // 2
    assert x_TD.stride(1) == 1, x_TD.stride()
    assert ids_TS.is_contiguous(), ids_TS.stride()
    if tiles is None:
        tiles = expert_tiles(T, k, E, D, I, x_TD.dtype, gate_up.form)
    assert tiles.is_sorted or tiles.gate_up.block_m >= T, (T, tiles)
    pairs = group(ids_TS, E, tiles.gate_up.block_m) if tiles.is_sorted else (ids_TS, None)
    h_PI, y_STD = x_TD.new_empty(T * k, I), x_TD.new_empty(k, T, D)
    limit, alpha = (None, None) if clamp is None else clamp
    activation = {"IS_GATED": True, "LIMIT": limit, "ALPHA": alpha}
    rows = _rows(x_TD, gate_up) if codes is None else codes
    _launch(h_PI, rows, gate_up, pairs, ids_TS, tiles.gate_up, activation)
    is_gated = {"IS_GATED": False}
    _launch(y_STD, _rows(h_PI, down), down, pairs, ids_TS, tiles.down, is_gated)
    return y_STD


def _rows(x_XK: Tensor, weight: Weight) -> tuple[Tensor, Tensor | None]:
    """Quantise rows for a weight of 8 bits; the others have no scales."""
    return launch_quantise(x_XK, weight.is_block) if weight.form == "fp8" else (x_XK, None)


def _launch(
    out: Tensor,
    x: tuple[Tensor, Tensor | None],
    weight: Weight,
    pairs: tuple[Tensor, Tensor | None],
    ids_TS: Tensor,
    shape: Shape,
    activation: Mapping[str, object],
) -> None:
    """x: rows, or where nothing is gated pairs, and scales. pairs: `Groups`, or the ids alone."""
    x_XK, x_scales = x
    (T, k), K = ids_TS.shape, x_XK.shape[1]
    E, N = weight.num_experts, out.shape[-1]
    pair_P, tiles_M3 = pairs
    has_tiles = tiles_M3 is not None
    num_tiles = min(E, T * k) if tiles_M3 is None else len(tiles_M3)
    form: dict[str, object] = {"scales_ptr": weight.scales, "bias_ptr": weight.bias_EN}
    if weight.form == "packed":
        rows = shape.block_n // ROWS * ROWS_OF_WORDS * (2 if activation["IS_GATED"] else 1)
        w = describe(weight.data.view(-1, WORDS), rows, WORDS)
        form["IS_COMPILED"] = not INTERPRET
    else:
        w = describe(weight.data.flatten(0, 1), shape.block_n, shape.block_k)
    if x_scales is not None:
        stride = x_scales.stride(0) if weight.is_block else 0
        form |= {"x_scales_ptr": x_scales, "stride_scales": stride, "IS_BLOCK": weight.is_block}
    flags = {"HAS_TILES": has_tiles, "IS_WHOLE": K % shape.block_k == 0}
    flags["IS_KEPT"] = shape.block_m < COMPUTING_ROWS
    block_m, tail = row_pieces(shape.block_m)
    blocks = {"BLOCK_N": shape.block_n, "BLOCK_K": shape.block_k}
    blocks |= {"BLOCK_M": block_m, "TAIL": tail, "BLOCK_E": next_power_of_2(E + 1)}
    blocks |= {"BLOCK_P": next_power_of_2(shape.block_m * k), "BLOCK_S": next_power_of_2(k)}
    options = {"num_stages": shape.num_stages, "num_warps": shape.num_warps}
    _expert_kernel[(num_tiles * -(-N // shape.block_n),)](
        *(out, x_XK, w, pair_P, pair_P if tiles_M3 is None else tiles_M3),
        *(num_tiles, T, x_XK.stride(0), N, K, E),
        **{"SLOTS": k, **activation} | flags | blocks | form,
        **options | launch_options(x_XK) | need(),
    )


@jit(varying=("num_tiles", "T", "stride_scales"))
def _expert_kernel(
    out_ptr,  # gated: [P, N]; else [SLOTS, T, N]
    x_ptr,  # gated: [T, K]; else [P, K]
    w,  # [E N, K], gated [E 2N, K], in tiles [BLOCK_N, BLOCK_K]; MXFP4: see load_packed
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL: tl.constexpr,  # more rows of a sorted tile, after BLOCK_M
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
    LIMIT: tl.constexpr = None,  # of the clamped SwiGLU
    ALPHA: tl.constexpr = None,
    bias_ptr=None,  # [E, N], gated [E, 2N]
    scales_ptr=None,  # MXFP4: [E, K / 128, N], gated [E, K / 128, 2N]; 8 bits: so, or [E, N]
    IS_COMPILED: tl.constexpr = True,
    x_scales_ptr=None,  # 8 bits: [T] or [P], or with IS_BLOCK for each 128 of K
    stride_scales=0,  # from these 128 to the next
    IS_BLOCK: tl.constexpr = False,
    needed_ptr=None,  # [1]; see needed.py
):
    if IS_GATED:
        wait_for_inputs(PDL)
    n_tiles = tl.cdiv(N, BLOCK_N)
    if HAS_TILES:
        n_tile, tile = place_of(tl.program_id(0), n_tiles, num_tiles)
        expert, first, last = of_tile(tiles_ptr + tile * 3)
        pair = pairs_at(pair_ptr, first, last, BLOCK_M)
    else:
        n_tile = tl.program_id(0) % n_tiles
        j = tl.program_id(0) // n_tiles
        ids = ids_of_rows(pair_ptr, T, SLOTS, BLOCK_M, BLOCK_S)
        if T == 1:  # its experts differ
            expert = tl.load(pair_ptr + j, cache_modifier=".cg")
            expert = tl.where(expert < E, expert, -1)
        else:
            expert = nth_expert(pair_ptr, T * SLOTS, j, E, BLOCK_E, BLOCK_P)
        pair = pairs_of_rows(ids, expert, SLOTS)
    if not IS_GATED:  # ids, and what group.py made of them, were there before the product of gates
        wait_for_inputs(PDL)
    if needed_ptr is not None:  # noqa: SIM102  # what is compiled
        if tl.load(needed_ptr) == 0:
            return
    if expert < 0:
        return
    n0 = n_tile * BLOCK_N
    num_n = N * (2 if IS_GATED else 1)
    row = expert * num_n + n0
    x_at = rows_at(x_ptr, pair, stride_x, SLOTS, IS_GATED)
    # a tile of MXFP4 has gate and up rows
    JOINED: tl.constexpr = scales_ptr is not None and x_scales_ptr is None and IS_GATED
    total = tl.zeros((2 * BLOCK_N if JOINED else BLOCK_N, BLOCK_M), tl.float32)
    up = total
    if TAIL > 0:
        pair_rest = pairs_at(pair_ptr, first + BLOCK_M, last, TAIL)
        rest_at = rows_at(x_ptr, pair_rest, stride_x, SLOTS, IS_GATED)
        rest = tl.zeros((total.shape[0], TAIL), tl.float32)
        up_rest = rest
    if x_scales_ptr is not None:
        tl.static_assert(TAIL == 0)
        groups = tl.cdiv(K, BLOCK_K) if IS_BLOCK else 1
        scales = x_scales_ptr, scales_ptr + expert.to(tl.int64) * groups * num_n
        x_row = pair // SLOTS if IS_GATED else pair
        total, up = fp8_sums(
            *(w, row, x_at, pair, x_row, scales, n0, N, K, num_n, stride_scales),
            *(IS_GATED, IS_WHOLE, IS_BLOCK, BLOCK_N, BLOCK_K),
        )
    else:
        for i in range(tl.cdiv(K, BLOCK_K)):
            k = i * BLOCK_K + tl.arange(0, BLOCK_K)
            if scales_ptr is None:
                w_tile = w.load([row, i * BLOCK_K])
            else:
                w_tile = load_packed(
                    *(w, scales_ptr, expert, n0, N, K, i, 2 if IS_GATED else 1),
                    *(BLOCK_N, BLOCK_K, x_ptr.dtype.element_ty, IS_COMPILED),
                )
            x = columns_of(x_at, pair, k, K, IS_WHOLE)
            total = tl.dot(w_tile, x, total, input_precision="ieee")
            if TAIL > 0:
                x_rest = columns_of(rest_at, pair_rest, k, K, IS_WHOLE)
                rest = tl.dot(w_tile, x_rest, rest, input_precision="ieee")
            if scales_ptr is not None and IS_COMPILED:
                total = finished(total)
                if TAIL > 0:
                    rest = finished(rest)
            if IS_GATED and not JOINED:
                w_up = w.load([row + N, i * BLOCK_K])
                up = tl.dot(w_up, x, up, input_precision="ieee")
                if TAIL > 0:
                    up_rest = tl.dot(w_up, x_rest, up_rest, input_precision="ieee")
    let_the_next_start(PDL)
    if bias_ptr is not None:
        bias_ptr += expert * num_n
    if JOINED:
        total, up = _halves(total)
        if TAIL > 0:
            rest, up_rest = _halves(rest)
    _store(
        *(out_ptr, bias_ptr, total, up, pair, n0, N, T),
        *(SLOTS, IS_GATED, IS_KEPT, LIMIT, ALPHA),
    )
    if TAIL > 0:
        _store(
            *(out_ptr, bias_ptr, rest, up_rest, pair_rest, n0, N, T),
            *(SLOTS, IS_GATED, IS_KEPT, LIMIT, ALPHA),
        )


@jit
def _halves(x):
    """Return the first rows and the others, as many."""
    pairs = tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]])
    return tl.split(tl.permute(pairs, [1, 2, 0]))


@jit
def _store(
    out_ptr,
    bias_ptr,
    total,
    up,
    pair,
    n0,
    N,
    T,
    SLOTS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_KEPT: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
):
    """Add biases, apply SwiGLU if gated, round once, and store by pair, or by slot and row."""
    if bias_ptr is not None:
        total += _bias_beside(bias_ptr, n0, N, total.shape[0])
        if IS_GATED:
            up += _bias_beside(bias_ptr + N, n0, N, total.shape[0])
    if IS_GATED:
        total = _activated(total, up, LIMIT, ALPHA)
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
def _bias_beside(bias_ptr, n0, N, BLOCK_N: tl.constexpr):
    """Load a bias as a column beside a tile of sums."""
    n = n0 + tl.arange(0, BLOCK_N)
    return tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]


@jit
def _activated(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Apply SwiGLU, clamped if there is a limit, which leaves NaN as it is."""
    if LIMIT is None:
        return gate / (1.0 + tl.exp(-gate)) * up
    else:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
