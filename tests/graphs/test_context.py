import threading

import pytest

from graphs.context import context_in, get_forward_context
from graphs.modes import CUDAGraphMode

NONE = CUDAGraphMode.NONE


def test_the_context_before_returns_after_the_inner_one(in_context):
    with in_context(num_tokens=3):
        with in_context(num_tokens=5):
            assert get_forward_context().num_tokens == 5
        assert get_forward_context().num_tokens == 3
    assert context_in(NONE) is None


def test_no_context_is_an_error_that_says_what_to_do():
    with pytest.raises(RuntimeError, match="set_forward_context"):
        get_forward_context()


def test_a_context_belongs_to_its_thread(in_context):
    seen = []
    with in_context():
        assert context_in(NONE) is get_forward_context()
        thread = threading.Thread(target=lambda: seen.append(context_in(NONE)))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_context_is_in_one_mode(in_context):
    with in_context(CUDAGraphMode.FULL) as context:
        assert context_in(CUDAGraphMode.FULL) is context
        assert context_in(CUDAGraphMode.PIECEWISE) is None
