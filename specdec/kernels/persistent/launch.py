"""The launch of a product, and what is chosen for it on the host: form, programs, descriptors."""

from functools import cache

import torch
from torch import Tensor

from specdec.kernels import num_multiprocessors
from specdec.kernels.needed import need
from specdec.kernels.persistent.descriptors import describe_out, describe_rows, describe_weight
from specdec.kernels.persistent.form import BLOCK_K, LEFT_SUMS, OUT_ROWS, Form
from specdec.kernels.persistent.kernel import persistent_kernel
from specdec.kernels.tile_shapes import RELAY, row_pieces, takes_turns
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
    is_relay = tiles.cuts == RELAY
    cuts = 1 if is_relay else tiles.cuts
    w_desc, up_desc = describe_weight(weight_NK, N, tiles, has_turns)
    persistent_kernel[(_num_programs(out_STN, tiles, height),)](
        describe_out(out_STN, height // groups, groups),
        w_desc,
        up_desc,
        *describe_rows(x_TK, block_m, tail or block_m // cuts),
        weight_NK if bias_N is None else bias_N,
        *(_relay_room(x_TK.device) if is_relay else (weight_NK, weight_NK)),
        T,
        N,
        x_TK.shape[1],
        FORM=Form(
            splits=tiles.splits,
            walked=tiles.splits // S,
            is_gated=is_gated and not has_turns,
            has_bias=bias_N is not None,
            tail=tail,
            cuts=cuts,
            is_relay=is_relay,
            num_left=LEFT_SUMS,
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
    m_tiles = -(-T // tiles.block_m)
    at_once = num_multiprocessors(out_STN.device)
    if tiles.cuts == RELAY:
        at_once -= at_once % m_tiles
    return min(S * -(-N // height) * m_tiles, at_once)


@cache
def _relay_room(device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums that each group of warps leaves to the next program, and flags that are 1 meanwhile.

    One product at a time uses them: those of a device run on one stream. They are made at the
    first launch, which comes before any capture: graphs hold their addresses.
    """
    assert not torch.cuda.is_current_stream_capturing(), "a relay's first launch is in a capture"
    groups = 2 * num_multiprocessors(device)
    room = torch.empty(groups, LEFT_SUMS, dtype=torch.float32, device=device)
    return room, torch.zeros(groups, dtype=torch.int32, device=device)


def _may_leave_late(out_STN: Tensor, K: int, tiles: Tiles) -> bool:
    """Whether a tile's results can wait for the next tile: in 16 bits, beside one sum."""
    S = len(out_STN)
    block_m, tail = row_pieces(tiles.block_m)
    num_blocks = K // tiles.splits // BLOCK_K
    is_alone = tail == 0 and tiles.splits == S
    return is_alone and out_STN.element_size() == 2 and num_blocks >= block_m // OUT_ROWS
