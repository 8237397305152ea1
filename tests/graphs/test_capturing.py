import threading

import pytest

from graphs.capturing import (
    exclusive_capture,
    set_cudagraph_capturing_enabled,
    validate_cudagraph_capturing_enabled,
)
from graphs.protocol import CaptureError


@pytest.fixture
def pool(backend):
    return backend.new_pool()


def test_a_second_capture_in_the_same_thread_names_both(pool):
    with (
        exclusive_capture("the first", pool),
        pytest.raises(RuntimeError, match="the second began inside the first"),
        exclusive_capture("the second", pool),
    ):
        pass
    with exclusive_capture("after both", pool):
        pass


def test_two_threads_may_capture_at_once(pool):
    done = []

    def capture():
        with exclusive_capture("there", pool):
            done.append("there")

    with exclusive_capture("here", pool):
        thread = threading.Thread(target=capture)
        thread.start()
        thread.join()
    assert done == ["there"]


def test_the_switch_forbids_every_later_capture_into_its_pool_and_no_other(pool, backend):
    set_cudagraph_capturing_enabled(pool, False)
    for check in (
        validate_cudagraph_capturing_enabled,
        lambda *given: exclusive_capture(*given).__enter__(),
    ):
        with pytest.raises(CaptureError, match="a graph would be captured now"):
            check("a graph", pool)
    validate_cudagraph_capturing_enabled("a graph", backend.new_pool())
    set_cudagraph_capturing_enabled(pool, True)
    validate_cudagraph_capturing_enabled("a graph", pool)
