"""Turns come in the order in which threads ask, and calls of finalisers fall between them."""

import threading
import time

import pytest

from specdec.requests.turns import Turns


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def started(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_threads_get_turns_in_the_order_in_which_they_ask():
    turns = Turns()
    seen = []
    threads = []

    def take(name):
        with turns:
            seen.append(name)

    with turns:
        for name in range(6):
            threads.append(started(lambda name=name: take(name)))
            until(lambda count=name + 2: len(turns._line) == count)
    for thread in threads:
        thread.join(20)
    assert seen == list(range(6))


def test_a_thread_that_takes_turn_after_turn_leaves_some_to_others():
    turns = Turns()
    counts = [0, 0, 0]
    is_over = threading.Event()

    def take(index):
        while not is_over.is_set():
            with turns:
                counts[index] += 1

    threads = [started(lambda index=index: take(index)) for index in range(3)]
    until(lambda: min(counts) > 100)
    is_over.set()
    for thread in threads:
        thread.join(20)
    assert not turns._line


def test_a_call_waits_for_the_end_of_the_turn_and_for_nothing_else():
    turns = Turns()
    seen = []
    with turns:
        turns.call_soon(lambda: seen.append("called"))
        seen.append("in the turn")
    turns.call_soon(lambda: seen.append("at once"))
    assert seen == ["in the turn", "called", "at once"]


def test_a_turn_that_fails_is_over():
    turns = Turns()
    with pytest.raises(KeyError), turns:
        raise KeyError
    with turns:
        assert len(turns._line) == 1


def test_a_thread_interrupted_while_waiting_delays_no_other(monkeypatch):
    turns = Turns()
    real = threading.Lock
    seen = []

    class Interrupted:
        """A lock whose owner gets Ctrl-C as it waits."""

        def __init__(self):
            self._count = 0

        def acquire(self):
            self._count += 1
            if self._count == 2:
                raise KeyboardInterrupt

    with turns:
        monkeypatch.setattr(threading, "Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            turns.__enter__()
        monkeypatch.setattr(threading, "Lock", real)
        thread = started(lambda: [turns.__enter__(), seen.append(1), turns.__exit__()])
        until(lambda: len(turns._line) == 2)
    thread.join(20)
    assert (seen, len(turns._line)) == ([1], 0)
