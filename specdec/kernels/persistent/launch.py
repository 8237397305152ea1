"""The launch of a product, and what the host chooses for it: variant, programs, descriptors."""

from torch import Tensor

from specdec.kernels import num_multiprocessors
from specdec.kernels.needed import need
from specdec.kernels.persistent.descriptors import describe_out, describe_rows, describe_weight
from specdec.kernels.persistent.kernel import persistent_kernel
from specdec.kernels.persistent.variant import BLOCK_K, OUT_ROWS, Variant
from specdec.kernels.tile_shapes import row_pieces, takes_turns
from specdec.kernels.tiles import Tiles


def launch_persistent(
    out_STN: Tensor,
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    tiles: Tiles,
    is_gated: bool = False,
) -> None:
    """Write the splits' sums, or with S = 1 their total. is_gated: gate rows of W before up rows.

    N must be a multiple of 8, the halves' too. A bias needs S = 1. No launch since the last
    synchronisation may write the weight.
    """
    S, T, N = out_STN.shape
    block_m, tail = row_pieces(tiles.block_m)
    has_turns = takes_turns("gate" if is_gated else "split", tiles)
    groups = tiles.block_n // 64
    height = tiles.block_n // 2 if has_turns else tiles.block_n
    w_desc, up_desc = describe_weight(weight_NK, N, tiles, has_turns)
    persistent_kernel[(_num_programs(out_STN, tiles, height),)](
        describe_out(out_STN, height // groups, groups),
        w_desc,
        up_desc,
        *describe_rows(x_TK, block_m, tail or block_m // tiles.cuts),
        weight_NK if bias_N is None else bias_N,
        T,
        N,
        x_TK.shape[1],
        VARIANT=Variant(
            splits=tiles.splits,
            walked=tiles.splits // S,
            is_gated=is_gated and not has_turns,
            has_bias=bias_N is not None,
            tail=tail,
            cuts=tiles.cuts,
            num_stages=tiles.num_stages,
            height=height,
            groups=groups,
            copy_registers=40 if groups == 2 else 24,  # what the groups leave
            is_late=_may_leave_late(out_STN, x_TK.shape[1], tiles),
            has_turns=has_turns,
        ),
        num_warps=4,
        launch_pdl=True,
        **need(),
    )


def _num_programs(out_STN: Tensor, tiles: Tiles, height: int) -> int:
    S, T, N = out_STN.shape
    num_tiles = S * -(-N // height) * -(-T // tiles.block_m)
    return min(num_tiles, num_multiprocessors(out_STN.device))


def _may_leave_late(out_STN: Tensor, K: int, tiles: Tiles) -> bool:
    """Whether a tile's results can wait for the next tile: in 16 bits, beside one sum."""
    S = len(out_STN)
    block_m, tail = row_pieces(tiles.block_m)
    num_blocks = K // tiles.splits // BLOCK_K
    is_alone = tail == 0 and tiles.splits == S
    return is_alone and out_STN.element_size() == 2 and num_blocks >= block_m // OUT_ROWS
