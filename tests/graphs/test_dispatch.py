import pytest

from graphs.dispatch import Dispatch, Dispatcher, agreed_batch
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.sizes import capture_sizes

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("max_num_reqs", [1, 7, 48])
def test_every_request_count_and_every_token_count_has_a_graph(k, max_num_reqs):
    sizes = capture_sizes(max_num_reqs, max_num_reqs * (k + 1))
    dispatcher = Dispatcher(k + 1)
    dispatcher.set_captured(sizes.requests, sizes.tokens)
    for n in range(1, max_num_reqs + 1):
        chosen = dispatcher.dispatch(n, n * (k + 1), k + 1)
        assert chosen.mode is FULL
        assert chosen.descriptor.num_reqs >= n
        assert chosen.descriptor.num_tokens == chosen.descriptor.num_reqs * (k + 1)
        assert n > 8 or chosen.descriptor.num_reqs == n
    for n in range(1, max_num_reqs * (k + 1) + 1):
        chosen = dispatcher.dispatch(1, n, None)
        assert chosen == Dispatch(
            PIECEWISE, BatchDescriptor(min(s for s in sizes.tokens if s >= n))
        )


def test_before_any_capture_a_batch_keeps_its_true_sizes():
    assert Dispatcher(4).dispatch(3, 12, 4) == Dispatch(NONE, BatchDescriptor(12, 3, 4))


def test_a_batch_too_large_for_full_falls_to_piecewise_then_to_eager():
    dispatcher = Dispatcher(2)
    dispatcher.set_captured([1, 2], [4, 8])
    assert dispatcher.dispatch(3, 6, 2) == Dispatch(PIECEWISE, BatchDescriptor(8))
    assert dispatcher.dispatch(9, 18, 2) == Dispatch(NONE, BatchDescriptor(18, 9, 2))
    assert dispatcher.dispatch(1, 9, None) == Dispatch(NONE, BatchDescriptor(9, 1, None))


def test_a_ragged_batch_takes_the_smallest_shape_that_holds_it():
    dispatcher = Dispatcher(4)
    dispatcher.set_captured([2], [64], shapes=[(8, 16), (4, 8), (2, 16), (8, 8)])

    def chosen(num_reqs, num_tokens, query_len=None, takes_shapes=True):
        return dispatcher.dispatch(num_reqs, num_tokens, query_len, False, takes_shapes)

    of = BatchDescriptor
    assert chosen(3, 5) == Dispatch(FULL, of(8, 4))
    assert chosen(5, 8) == Dispatch(FULL, of(8, 8))
    assert chosen(2, 9) == Dispatch(FULL, of(16, 2))
    assert chosen(3, 9) == Dispatch(FULL, of(16, 8))
    assert chosen(3, 17) == chosen(3, 5, takes_shapes=False) == Dispatch(PIECEWISE, of(64))
    assert chosen(9, 9) == Dispatch(PIECEWISE, of(64))
    assert chosen(2, 8, 4) == Dispatch(FULL, of(8, 2, 4))


def test_batches_with_lora_have_graphs_of_their_own():
    dispatcher = Dispatcher(2)
    dispatcher.set_captured([1, 2], [8])
    assert dispatcher.dispatch(1, 2, 2, has_lora=True) == Dispatch(
        NONE, BatchDescriptor(2, 1, 2, True)
    )
    dispatcher.set_captured([4], [16], has_lora=True)
    assert dispatcher.dispatch(1, 2, 2, has_lora=True) == Dispatch(
        FULL, BatchDescriptor(8, 4, 2, True)
    )
    assert dispatcher.dispatch(1, 3, None, has_lora=True) == Dispatch(
        PIECEWISE, BatchDescriptor(16, has_lora=True)
    )
    assert dispatcher.dispatch(1, 2, 2) == Dispatch(FULL, BatchDescriptor(2, 1, 2))


def test_ranks_agree_on_the_smallest_batch_that_holds_all_of_theirs():
    of = BatchDescriptor
    assert agreed_batch([of(6, 3, 2), of(10, 5, 2)]) == of(10, 5, 2)
    assert agreed_batch([of(6, 3, 2), of(7, 2, None), of(1, 1, 1)]) == of(7, 3, None)
    assert agreed_batch([of(2, 1, 2), of(2, 1, 2, True)]) == of(2, 1, 2, True)


def test_uniform_rows_of_another_length_are_not_the_full_graphs():
    dispatcher = Dispatcher(2)
    dispatcher.set_captured([1, 2], [4])
    assert dispatcher.dispatch(1, 3, 3).mode is PIECEWISE


@pytest.mark.parametrize("num_reqs, num_tokens, query_len", [(0, 0, None), (3, 2, None), (2, 5, 2)])
def test_counts_that_cannot_be_are_refused(num_reqs, num_tokens, query_len):
    with pytest.raises(ValueError, match=f"num_reqs={num_reqs}"):
        Dispatcher(2).dispatch(num_reqs, num_tokens, query_len)
