"""Rows that are padding hold what the comments of the buffers say, whatever stood there before."""

import pytest
import torch

from specdec.rounds.buffers import BufferSizes, StepBuffers
from specdec.sizes import chain
from tests.specdec.buffer_tensors import buffer_tensors

ZERO = {"input_ids", "positions", "num_valid", "last_token_indices", "draft_input_ids"}
ZERO |= {"draft_last_tokens", "draft_positions", "proposed_tokens"}
NONE = {
    "idx_mapping",
    "sample_mapping",
    "sample_states",
    "slot_mapping",
    "draft_slots",
    "draft_sample_slots",
}


@pytest.fixture
def buffers():
    sizes = BufferSizes(
        max_tokens=9,
        max_reqs=3,
        shape=chain(2),
        hidden_size=4,
        aux_width=0,
        draft_hidden_size=4,
    )
    made = StepBuffers(sizes, torch.float32, torch.device("cpu"))
    for tensor in buffer_tensors(made).values():
        tensor.fill_(77)
    return made


def test_every_row_that_a_graph_is_captured_with_is_padding(buffers):
    buffers.fill_padding([3, 3, 2])
    values = {
        name: set(tensor.flatten().tolist()) for name, tensor in buffer_tensors(buffers).items()
    }
    assert {name for name, value in values.items() if value == {0}} == ZERO
    assert {name for name, value in values.items() if value == {-1}} == NONE
    assert buffers.prompt_start_loc.tolist() == [0, 3, 6, 8]


def test_rows_are_padded_from_one_to_another(buffers):
    buffers.pad_rows(4, 7)
    for name in ("input_ids", "positions", "draft_input_ids"):
        assert getattr(buffers, name).tolist() == [77] * 4 + [0] * 3 + [77] * 2, name
    assert buffers.slot_mapping.tolist() == [77] * 4 + [-1] * 3 + [77] * 2
