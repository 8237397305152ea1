import threading

import pytest

from graphs.context import get_forward_context, has_forward_context


def test_the_context_before_returns_after_the_inner_one(in_context):
    with in_context(num_tokens=3):
        with in_context(num_tokens=5):
            assert get_forward_context().num_tokens == 5
        assert get_forward_context().num_tokens == 3
    assert not has_forward_context()


def test_no_context_is_an_error_that_says_what_to_do():
    with pytest.raises(RuntimeError, match="set_forward_context"):
        get_forward_context()


def test_a_context_belongs_to_its_thread(in_context):
    seen = []
    with in_context():
        thread = threading.Thread(target=lambda: seen.append(has_forward_context()))
        thread.start()
        thread.join()
    assert seen == [False]
