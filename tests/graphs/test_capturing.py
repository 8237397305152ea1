import threading

import pytest

from graphs.capturing import (
    exclusive_capture,
    is_capturing,
    set_cudagraph_capturing_enabled,
    validate_cudagraph_capturing_enabled,
)
from graphs.errors import CaptureError


def test_a_second_capture_in_the_same_thread_names_both():
    with exclusive_capture("the first"):
        assert is_capturing()
        with pytest.raises(RuntimeError, match="the second began inside the first"), exclusive_capture("the second"):
            pass
    assert not is_capturing()


def test_two_threads_may_capture_at_once():
    seen = []
    with exclusive_capture("here"):
        thread = threading.Thread(target=lambda: seen.append(is_capturing()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_the_switch_forbids_every_later_capture():
    set_cudagraph_capturing_enabled(False)
    with pytest.raises(CaptureError, match="a graph would be captured now"):
        validate_cudagraph_capturing_enabled("a graph")
    set_cudagraph_capturing_enabled(True)
    validate_cudagraph_capturing_enabled("a graph")
