import pytest

from graphs.dispatch import Dispatch, Dispatcher, agreed_batch
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.sizes import capture_sizes

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
of = BatchDescriptor


def dispatcher_of(query_len=1, requests=(), tokens=(), further=(), has_lora=False):
    dispatcher = Dispatcher()
    uniform = [of(n * query_len, n, query_len, has_lora) for n in requests]
    pieces = [of(n, has_lora=has_lora) for n in tokens]
    dispatcher.set_captured([*uniform, *pieces, *further])
    return dispatcher


@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("max_num_reqs", [1, 7, 48])
def test_every_request_count_and_every_token_count_has_a_graph(k, max_num_reqs):
    sizes = capture_sizes(max_num_reqs, max_num_reqs * (k + 1))
    dispatcher = dispatcher_of(k + 1, sizes.requests, sizes.tokens)
    for n in range(1, max_num_reqs + 1):
        chosen = dispatcher.dispatch(of(n * (k + 1), n, k + 1))
        assert chosen.mode is FULL
        assert chosen.descriptor.num_reqs >= n
        assert chosen.descriptor.num_tokens == chosen.descriptor.num_reqs * (k + 1)
        assert n > 8 or chosen.descriptor.num_reqs == n
    for n in range(1, max_num_reqs * (k + 1) + 1):
        chosen = dispatcher.dispatch(of(n, 1))
        assert chosen == Dispatch(PIECEWISE, of(min(s for s in sizes.tokens if s >= n)))


def test_before_any_capture_a_batch_keeps_its_true_sizes():
    assert Dispatcher().dispatch(of(12, 3, 4)) == Dispatch(NONE, of(12, 3, 4))


def test_a_batch_too_large_for_full_falls_to_piecewise_then_to_eager():
    dispatcher = dispatcher_of(2, [1, 2], [4, 8])
    assert dispatcher.dispatch(of(6, 3, 2)) == Dispatch(PIECEWISE, of(8))
    assert dispatcher.dispatch(of(18, 9, 2)) == Dispatch(NONE, of(18, 9, 2))
    assert dispatcher.dispatch(of(9, 1)) == Dispatch(NONE, of(9, 1))


def test_a_ragged_batch_takes_the_smallest_graph_that_holds_it():
    further = [of(16, 8), of(8, 4), of(16, 2), of(8, 8)]
    dispatcher = dispatcher_of(4, [2], [64], further)

    def chosen(num_reqs, num_tokens, query_len=None, kind=None):
        return dispatcher.dispatch(of(num_tokens, num_reqs, query_len, kind=kind))

    assert chosen(3, 5) == Dispatch(FULL, of(8, 4))
    assert chosen(5, 8) == Dispatch(FULL, of(8, 8))
    assert chosen(2, 9) == Dispatch(FULL, of(16, 2))
    assert chosen(3, 9) == Dispatch(FULL, of(16, 8))
    assert chosen(3, 17) == chosen(3, 5, kind="other") == Dispatch(PIECEWISE, of(64))
    assert chosen(9, 9) == Dispatch(PIECEWISE, of(64))
    assert chosen(2, 8, 4) == Dispatch(FULL, of(8, 2, 4))


def test_rows_of_every_request_and_kinds_tell_graphs_of_one_size_apart():
    ragged, wide, drawn = of(64, 8), of(64, 8, 8), of(64, 8, kind="drawn")
    dispatcher = dispatcher_of(further=[wide, drawn, ragged, of(80, 5, 16)])
    assert dispatcher.dispatch(of(60, 8)) == Dispatch(FULL, ragged)
    assert dispatcher.dispatch(of(56, 7, 8)) == Dispatch(FULL, wide)
    assert dispatcher.dispatch(of(60, 8, kind="drawn")) == Dispatch(FULL, drawn)
    assert dispatcher.dispatch(of(64, 4, 16)) == Dispatch(FULL, of(80, 5, 16))
    assert dispatcher.dispatch(of(8, 1, 8, kind="drawn")).mode is NONE


def test_a_graph_of_more_requests_than_have_room_is_passed_over():
    dispatcher = dispatcher_of(further=[of(10, 10), of(32, 8)])
    assert dispatcher.dispatch(of(10, 2)) == Dispatch(FULL, of(10, 10))
    assert dispatcher.dispatch(of(10, 2), most_reqs=8) == Dispatch(FULL, of(32, 8))
    assert dispatcher.dispatch(of(10, 2), most_reqs=4).mode is NONE


def test_batches_with_lora_have_graphs_of_their_own():
    dispatcher = dispatcher_of(2, [1, 2], [8])
    assert dispatcher.dispatch(of(2, 1, 2, True)) == Dispatch(NONE, of(2, 1, 2, True))
    further = [of(8, 4, 2, True), of(16, has_lora=True)]
    dispatcher = dispatcher_of(2, [1, 2], [8], further)
    assert dispatcher.dispatch(of(2, 1, 2, True)) == Dispatch(FULL, of(8, 4, 2, True))
    assert dispatcher.dispatch(of(3, 1, None, True)) == Dispatch(PIECEWISE, of(16, has_lora=True))
    assert dispatcher.dispatch(of(2, 1, 2)) == Dispatch(FULL, of(2, 1, 2))


def test_ranks_agree_on_the_smallest_batch_that_holds_all_of_theirs():
    assert agreed_batch([of(6, 3, 2), of(10, 5, 2)]) == of(10, 5, 2)
    assert agreed_batch([of(6, 3, 2), of(7, 2, None), of(1, 1, 1)]) == of(7, 3, None)
    assert agreed_batch([of(2, 1, 2), of(2, 1, 2, True)]) == of(2, 1, 2, True)


def test_uniform_rows_of_another_length_are_not_the_full_graphs():
    dispatcher = dispatcher_of(2, [1, 2], [4])
    assert dispatcher.dispatch(of(3, 1, 3)).mode is PIECEWISE


@pytest.mark.parametrize("num_reqs, num_tokens, query_len", [(0, 0, None), (3, 2, None), (2, 5, 2)])
def test_counts_that_cannot_be_are_refused(num_reqs, num_tokens, query_len):
    with pytest.raises(ValueError, match=f"num_reqs={num_reqs}"):
        Dispatcher().dispatch(of(num_tokens, num_reqs, query_len))
