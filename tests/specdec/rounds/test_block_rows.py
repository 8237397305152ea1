"""The rows of blocks: kernel == twin, and where each row is, what it embeds and what it sees."""

import pytest
import torch

from specdec.rounds.block_rows import fill_blocks, fill_blocks_ref
from specdec.rounds.state import RequestState
from specdec.rounds.upload import RowStart, start_rows
from specdec.sizes import chain
from tests.specdec.buffer_tensors import step_buffers
from tests.specdec.kernels.by_kernel import by_kernel

K, MASK, LONGEST = 3, 77, 150
LAID_OUT = "block_ids", "block_positions", "block_slots", "block_limits"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def make(device, most_rows):
    """Requests whose anchors are at these positions, with numbers of drafts of their own."""
    buffers = step_buffers(device, 8, K, block_rows=most_rows)
    state = RequestState(6, chain(K), 3, 99, device)
    for name in LAID_OUT:
        getattr(buffers, name).fill_(-999)
    cases = [(5, K), (63, K), (64, 0), (LONGEST - 2, K), (LONGEST, K), (62, 1)]
    for row, (position, num_drafts) in enumerate(cases):
        blocks = [10 + row, 20 + row, 30 + row]
        start_rows(state, [(row, RowStart(blocks=blocks, num_draft_tokens=num_drafts))])
        state.num_computed_tokens[row] = position
    state.last_sampled_tokens.copy_(torch.arange(7) + 100)
    buffers.sample_mapping[:7] = torch.tensor([4, 0, 2, -1, 3, 1, 5], device=device)
    return buffers, state


# the last two are shorter than the longest blocks
@pytest.mark.parametrize("rows, most_rows", [(K, K), (K + 1, K + 1), (2, K), (K, K + 1)])
@pytest.mark.parametrize("by", [by_kernel(fill_blocks), fill_blocks_ref])
def test_rows_of_blocks_are_laid_out_after_the_anchor(device, by, rows, most_rows):
    buffers, state = make(device, most_rows)
    by(buffers, state, 7, rows, MASK, LONGEST)
    ids, positions, slots, limits = (
        getattr(buffers, name)[: 7 * rows].view(7, rows).tolist() for name in LAID_OUT
    )
    none = [[0] * rows, [0] * rows, [-1] * rows, [0] * rows]
    for slot in (0, 2, 3):  # beyond the context; without drafts; without a request
        assert [ids[slot], positions[slot], slots[slot], limits[slot]] == none
    assert ids[1] == [100, *[MASK] * (rows - 1)]
    assert positions[1] == list(range(5, 5 + rows))
    assert slots[1] == [10 * 64 + position for position in positions[1]]
    assert limits[1] == [5 + rows - 1] * rows
    assert ids[4] == [103, MASK, *[0] * (rows - 2)]  # two rows before the context's end
    assert positions[4][:2] == [LONGEST - 2, LONGEST - 1]
    assert slots[4][2:] == [-1] * (rows - 2)
    assert limits[4] == [LONGEST - 1] * rows
    assert slots[5] == [11 * 64 + 63, *(21 * 64 + i for i in range(rows - 1))]
    num_own = 1 + most_rows - K  # of a request with one draft
    assert positions[6] == [62 + i if i < num_own else 0 for i in range(rows)]
    assert limits[6] == [62 + num_own - 1] * rows
    assert all((getattr(buffers, name)[7 * rows :] == -999).all() for name in LAID_OUT)


@pytest.mark.parametrize("by", [by_kernel(fill_blocks), fill_blocks_ref])
def test_after_seeds_all_rows_are_masks_that_see_the_keys_up_to_themselves(device, by):
    rows = K - 1
    buffers, state = make(device, rows)
    by(buffers, state, 7, rows, MASK, LONGEST)
    ids, positions, slots, limits = (
        getattr(buffers, name)[: 7 * rows].view(7, rows).tolist() for name in LAID_OUT
    )
    assert limits == positions
    for slot in (0, 2, 3, 6):  # as above; and with one draft, which the seed proposes
        assert [ids[slot], positions[slot], slots[slot]] == [[0] * 2, [0] * 2, [-1] * 2]
    assert [ids[1], positions[1], slots[1]] == [[MASK] * 2, [5, 6], [645, 646]]
    assert [ids[4], positions[4]] == [[MASK] * 2, [LONGEST - 2, LONGEST - 1]]
    assert slots[5] == [11 * 64 + 63, 21 * 64]
    assert all((getattr(buffers, name)[7 * rows :] == -999).all() for name in LAID_OUT)
