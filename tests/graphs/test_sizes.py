import pytest

from graphs.sizes import capture_sizes, padding_map


def test_default_request_sizes_are_each_count_to_eight_then_steps_of_eight():
    assert capture_sizes(32, 1).requests == (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32)
    assert capture_sizes(20, 1).requests == (1, 2, 3, 4, 5, 6, 7, 8, 16, 20)
    assert capture_sizes(3, 1).requests == (1, 2, 3)


def test_default_token_sizes_are_powers_of_two_from_16_and_more_where_rows_cost():
    assert capture_sizes(1, 256).tokens == (16, 32, 64, 96, 128, 160, 192, 256)
    assert capture_sizes(1, 1100).tokens[-8:] == (384, 448, 512, 640, 768, 896, 1024, 1100)
    assert capture_sizes(1, 50).tokens == (16, 32, 50)
    assert capture_sizes(1, 7).tokens == (7,)


def test_given_sizes_are_sorted_and_checked():
    assert capture_sizes(8, 64, requests=[4, 1, 4], tokens=[]).requests == (1, 4)
    with pytest.raises(ValueError, match=r"\[9\].*limit of 8 requests"):
        capture_sizes(8, 64, requests=[9])
    with pytest.raises(ValueError, match="limit of 64 tokens"):
        capture_sizes(8, 64, tokens=[0])


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 9, 31, 100])
def test_every_count_is_padded_to_the_smallest_size_that_holds_it(largest):
    for sizes in (capture_sizes(largest, largest).requests, capture_sizes(largest, largest).tokens):
        assert padding_map(sizes) == [min(s for s in sizes if s >= n) for n in range(largest + 1)]
