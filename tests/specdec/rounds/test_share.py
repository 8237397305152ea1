"""Rows go to the most probable nodes of the whole batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.rounds.share import share_rows, share_rows_ref
from specdec.rounds.state import RequestState
from specdec.sizes import DraftShape, chain
from tests.specdec.buffer_tensors import step_buffers
from tests.specdec.kernels.by_kernel import by_kernel

K = 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHARES = [by_kernel(share_rows), share_rows_ref]


def batch(device, rows, probs, live=None, num_rows=6):
    """Buffers and state of slots whose state rows are `rows`, -1 for padding."""
    buffers = step_buffers(device, 9, K, is_adaptive=True)
    state = RequestState(num_rows, chain(K), 2, scratch_block=0, device=device, has_probs=True)
    buffers.idx_mapping.fill_(-1)
    buffers.rows_per_slot.fill_(-999)
    buffers.idx_mapping[: len(rows)] = torch.tensor(rows, device=device)
    state.draft_probs[:-1] = torch.tensor(probs, device=device)[:num_rows]
    state.draft_probs[-1] = 2.0  # of padding: larger than any
    state.num_nodes[:] = K
    if live is not None:
        state.num_nodes[:num_rows] = torch.tensor(live, device=device)
    return buffers, state


def shares_of(share, given, num_reqs, num_rows):
    buffers, state = given
    share(buffers, state, num_reqs, chain(K), num_rows)
    return buffers.rows_per_slot[:num_reqs].tolist()


def falling(values):
    """Path probabilities of one request."""
    return torch.tensor(values).cumprod(dim=0).tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", SHARES)
def test_the_most_probable_drafts_of_the_batch_get_the_rows(device, share):
    probs = [[0.9, 0.8, 0.1, 0.05], [0.3, 0.2, 0.1, 0.1], [0.7, 0.6, 0.5, 0.4]] * 2
    given = batch(device, [0, -1, 1, 2], probs)
    # three requests; then 0.9, 0.8, 0.7, 0.6
    assert shares_of(share, given, 4, 3 + 4) == [3, 0, 1, 3]
    assert shares_of(share, given, 4, 3 + 6) == [3, 0, 1, 5]
    assert shares_of(share, given, 4, 3) == [1, 0, 1, 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", SHARES)
def test_of_equals_the_lower_level_is_first_then_the_lower_slot(device, share):
    given = batch(device, [3, 1, 2, 0], [[0.5] * K] * 6)
    assert shares_of(share, given, 4, 4 + 6) == [3, 3, 2, 2]
    for num_rows in range(4, 21):
        rows = shares_of(share, given, 4, num_rows)
        assert sum(rows) == num_rows
        assert max(rows) - min(rows) <= 1
    given = batch(device, [3, 1], [[0.5] * K] * 6, live=[0, 4, 0, 1, 0, 0])
    assert shares_of(share, given, 2, 2 + 1) == [2, 1]
    assert shares_of(share, given, 2, 2 + 2) == [2, 2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", SHARES)
def test_a_zero_with_a_sign_is_as_probable_as_one_without(device, share):
    probs = [[0.5, -0.0, -0.0, -0.0], [0.0] * K, [0.5, -0.0, 0.0, -0.0]] * 2
    given = batch(device, [0, 1, 2], probs)
    assert shares_of(share, given, 3, 3 + 4) == [3, 2, 2]
    assert shares_of(share, given, 3, 3 + 12) == [5, 5, 5]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", SHARES)
def test_only_live_nodes_have_a_share(device, share):
    given = batch(device, [0, 1, 2, 3], [[0.5] * K] * 6, live=[0, 2, 1, 3, 4, 4])
    assert shares_of(share, given, 4, 64) == [1, 3, 2, 4]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", SHARES)
def test_of_fewer_nodes_the_others_have_none(device, share):
    """A step may verify fewer nodes than were proposed."""
    buffers, state = batch(device, [0, 1], [[0.9, 0.8, 0.7, 0.6], [0.5] * K] * 3)
    share(buffers, state, 2, DraftShape(2, 2, 2), 5)
    assert buffers.rows_per_slot[:2].tolist() == [3, 2]


@pytest.mark.parametrize("share", SHARES)
def test_a_node_never_goes_without_its_parent(share):
    """Wherever the probabilities of siblings lie, and if a parent's fell below its child's."""
    parents = [0, 0, 1, 1]
    probs = [[0.6, 0.3, 0.4, 0.2], [0.5, 0.4, 0.1, 0.05], [0.1, 0.9, 0.8, 0.7]] * 2
    for num_rows in range(3, 16):
        rows = shares_of(share, batch("cpu", [0, 1, 2], probs), 3, num_rows)
        assert sum(rows) == num_rows
        for count in rows:  # a request verifies its first nodes
            assert all(parent < count for parent in parents[: count - 1])
    assert shares_of(share, batch("cpu", [0, 1, 2], probs), 3, 3 + 4) == [2, 1, 4]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_kernel_and_its_twin_share_alike(data):
    rows = data.draw(st.permutations([0, 1, 2, 3, 4, 5, -1, -1]).map(lambda each: each[:7]))
    ratio = st.sampled_from([0.0, 1e-30, 0.2, 0.5, 0.9999999, 1.0])
    probs = data.draw(st.lists(st.lists(ratio, min_size=K, max_size=K), min_size=6, max_size=6))
    given = [falling(each) for each in probs]
    live = data.draw(st.lists(st.integers(0, K), min_size=6, max_size=6))
    num_real = sum(row >= 0 for row in rows)
    num_rows = data.draw(st.integers(num_real, 40))
    found = [shares_of(share, batch("cpu", rows, given, live), 7, num_rows) for share in SHARES]
    assert found[0] == found[1]
    num_live = sum(live[row] for row in rows if row >= 0)
    assert sum(found[0]) == min(num_rows, num_real + num_live)
    assert all(
        n == 0 if row < 0 else 1 <= n <= 1 + live[row]
        for row, n in zip(rows, found[0], strict=True)
    )
