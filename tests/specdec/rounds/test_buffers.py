"""Rows that are padding hold what the comments of the buffers say, whatever stood there before."""

import pytest
import torch

from specdec.sizes import BLOCK_SIZE, TreeShape
from tests.specdec.buffer_tensors import buffer_tensors, step_buffers

ZERO = {"input_ids", "positions", "num_valid", "last_token_indices", "draft_input_ids"}
ZERO |= {"draft_last_tokens", "draft_positions", "proposed_tokens", "listed_tiles"}
NONE = {
    "idx_mapping",
    "sample_mapping",
    "sample_states",
    "slot_mapping",
    "draft_slots",
    "draft_sample_slots",
}
TREE = TreeShape(num_levels=3, top_k=2, num_nodes=5)


def poisoned(**changes):
    made = step_buffers(
        torch.device("cpu"), **{"num_reqs": 3, "drafts": 2, "more_rows": 0} | changes
    )
    for tensor in buffer_tensors(made).values():
        tensor.fill_(77)
    return made


@pytest.fixture
def buffers():
    return poisoned()


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
    for name in ("slot_mapping", "sample_states"):
        assert getattr(buffers, name).tolist() == [77] * 4 + [-1] * 3 + [77] * 2, name


def test_padding_with_a_path_sees_one_slot_that_no_request_owns():
    wide = poisoned(drafts=TREE, num_reqs=2, num_kv_blocks=7)
    wide.fill_padding([6])
    assert wide.path_slots.shape == (2 * 6, 4)
    for slots in (wide.path_slots, wide.candidates.path_slots):
        assert set(slots.flatten().tolist()) == {7 * BLOCK_SIZE}
    for starts in (wide.path_starts, wide.candidates.starts):
        assert starts.tolist() == [0, 0]


def test_buffers_of_paths_are_empty_where_all_drafts_are_chains(buffers):
    names = ("path_rows", "path_slots", "path_starts", "accepted_rows", "path_sources")
    for name in (*names, "moved_from", "moved_to", "proposed_parents"):
        assert getattr(buffers, name).numel() == 0, name
    assert buffers.columns.parents.numel() == 0
    assert buffers.candidates.scores.numel() == 0
