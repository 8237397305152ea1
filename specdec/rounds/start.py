"""State rows of the requests that start with a step, and cache blocks of those that grow.

They are sent in one copy and one launch, since each small launch costs a step 3 microseconds.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specdec.kernels import jit, launch_options, pick, tl
from specdec.kernels.overlap import begin
from specdec.requests.row_start import RowStart
from specdec.rounds.state import RequestState
from specdec.rounds.upload import uploaded
from specdec.sizes import MAX_STOP_IDS

# columns of a request that starts: its row, K, and position from which stop ids may be drawn; the
# integers and the bits of the floats of SamplingRows; stop ids; then its blocks
NUM_INTEGERS, NUM_FLOATS = 4, 6
INTEGERS = 3
FLOATS = INTEGERS + NUM_INTEGERS
STOP_IDS = FLOATS + NUM_FLOATS
BLOCKS = STOP_IDS + MAX_STOP_IDS
AT_ONCE = 128  # blocks of a request, or of requests that grow


def start_rows(
    state: RequestState,
    starts: Sequence[tuple[int, RowStart]],
    grown: Sequence[tuple[int, int, int]] = (),
) -> None:
    """Write the rows in stream order, after all that was launched before.

    starts: state rows, and what is written to each. No row is given twice.
    grown: further blocks of others: (row, place in the block table, cache block) each
    """
    for row, start in starts:
        state.sampling.assign_large(row, start.sampling, start.generated)
    if not starts and not grown:
        return
    width = BLOCKS + max((len(start.blocks) for _, start in starts), default=0)
    rows = [_columns(state, row, start, width) for row, start in starts]
    packed_X = uploaded(np.array([*itertools.chain(*rows, *grown)]), state.block_table.device)
    write = pick(packed_X, launch_start_rows, start_rows_ref)
    write(state, packed_X, len(rows), width)


def _columns(state: RequestState, row: int, start: RowStart, width: int) -> list[int]:
    stop_ids = [*start.stop_ids] or [0]
    blocks = [*start.blocks]
    return [
        row,
        start.num_draft_tokens,
        start.min_position if start.stop_ids else 0,
        *state.sampling.integers_of(start.sampling),
        *np.array(state.sampling.floats_of(start.sampling), np.float32).view(np.int32).tolist(),
        *stop_ids,
        *stop_ids[:1] * (MAX_STOP_IDS - len(stop_ids)),
        *blocks,
        *[state.scratch_block] * (width - BLOCKS - len(blocks)),
    ]


def launch_start_rows(state: RequestState, packed_X: Tensor, num_starts: int, width: int) -> None:
    num_grown = (len(packed_X) - num_starts * width) // 3
    bounds = state.num_draft_tokens, state.min_positions
    progress = state.num_computed_tokens, state.num_nodes
    sampling = state.sampling.integers, state.sampling.floats, state.stop_ids
    sizes = state.block_table.shape[1], state.scratch_block, num_starts, num_grown, width
    _start_rows_kernel[(num_starts + -(-num_grown // AT_ONCE),)](
        *(packed_X, *bounds, *progress, *sampling, state.block_table, *sizes),
        INTEGERS=INTEGERS,
        NUM_INTEGERS=NUM_INTEGERS,
        FLOATS=FLOATS,
        NUM_FLOATS=NUM_FLOATS,
        STOP_IDS=STOP_IDS,
        NUM_IDS=MAX_STOP_IDS,
        BLOCKS=BLOCKS,
        AT_ONCE=AT_ONCE,
        num_warps=4,
        **launch_options(packed_X),
    )


@jit(varying=("scratch_block", "num_starts", "num_grown", "width"))
def _start_rows_kernel(
    packed_ptr,  # [num_starts, width], then [num_grown, 3]
    num_drafts_ptr,  # [R + 1]
    min_positions_ptr,  # [R + 1]
    num_computed_ptr,  # [R + 1]
    num_live_ptr,  # [R + 1]
    integers_ptr,  # [R + 1, NUM_INTEGERS]
    floats_ptr,  # [R + 1, NUM_FLOATS] float32
    stop_ids_ptr,  # [R + 1, NUM_IDS]
    block_table_ptr,  # [R + 1, M]
    M,
    scratch_block,
    num_starts,
    num_grown,
    width,
    INTEGERS: tl.constexpr,
    NUM_INTEGERS: tl.constexpr,
    FLOATS: tl.constexpr,
    NUM_FLOATS: tl.constexpr,
    STOP_IDS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Run a program for each request that starts, then one for each AT_ONCE blocks of others."""
    begin(PDL)
    i = tl.program_id(0)
    many = tl.arange(0, AT_ONCE)
    if i < num_starts:
        packed_ptr += i * width
        row = tl.load(packed_ptr)
        tl.store(num_drafts_ptr + row, tl.load(packed_ptr + 1))
        tl.store(min_positions_ptr + row, tl.load(packed_ptr + 2))
        tl.store(num_computed_ptr + row, tl.zeros((), tl.int64))
        tl.store(num_live_ptr + row, tl.zeros((), tl.int64))
        few = tl.arange(0, 8)
        integers = tl.load(packed_ptr + INTEGERS + few, mask=few < NUM_INTEGERS)
        tl.store(integers_ptr + row * NUM_INTEGERS + few, integers, mask=few < NUM_INTEGERS)
        bits = tl.load(packed_ptr + FLOATS + few, mask=few < NUM_FLOATS, other=0)
        floats = bits.to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(floats_ptr + row * NUM_FLOATS + few, floats, mask=few < NUM_FLOATS)
        id = tl.arange(0, NUM_IDS)
        tl.store(stop_ids_ptr + row * NUM_IDS + id, tl.load(packed_ptr + STOP_IDS + id))
        for first in range(0, M, AT_ONCE):
            place = first + many
            is_given = BLOCKS + place < width
            block = tl.load(packed_ptr + BLOCKS + place, mask=is_given, other=scratch_block)
            tl.store(block_table_ptr + row * M + place, block, mask=place < M)
    else:
        which = (i - num_starts) * AT_ONCE + many
        is_real = which < num_grown
        packed_ptr += num_starts * width
        row_X = tl.load(packed_ptr + 3 * which, mask=is_real, other=0)
        place_X = tl.load(packed_ptr + 3 * which + 1, mask=is_real, other=0)
        block_X = tl.load(packed_ptr + 3 * which + 2, mask=is_real, other=0)
        tl.store(block_table_ptr + row_X * M + place_X, block_X, mask=is_real)


def start_rows_ref(state: RequestState, packed_X: Tensor, num_starts: int, width: int) -> None:
    packed_BX = packed_X[: num_starts * width].view(num_starts, width)
    row_B = packed_BX[:, 0]
    state.num_draft_tokens[row_B] = packed_BX[:, 1]
    state.min_positions[row_B] = packed_BX[:, 2]
    state.num_computed_tokens[row_B] = 0
    state.num_nodes[row_B] = 0
    state.sampling.integers[row_B] = packed_BX[:, INTEGERS:FLOATS]
    state.sampling.floats[row_B] = (
        packed_BX[:, FLOATS:STOP_IDS].int().view(state.sampling.floats.dtype)
    )
    state.stop_ids[row_B] = packed_BX[:, STOP_IDS:BLOCKS]
    state.block_table[row_B] = state.scratch_block
    state.block_table[row_B, : width - BLOCKS] = packed_BX[:, BLOCKS:]
    row_X, place_X, block_X = packed_X[num_starts * width :].view(-1, 3).unbind(dim=1)
    state.block_table[row_X, place_X] = block_X
