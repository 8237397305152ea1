"""References to the ids of pools, which torch gives up without holding them."""

import ctypes
import sys

from graphs.cuda import _unharmed


def test_references_that_a_call_drops_are_given_back():
    numbers = (1000 * int("1"), 2000 * int("1"))  # no constants, which live for ever
    before = [sys.getrefcount(numbers[i]) for i in range(2)]
    for _ in range(3):
        with _unharmed(numbers):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(numbers[1]))
    assert [sys.getrefcount(numbers[i]) for i in range(2)] == before


def test_a_call_that_drops_none_gets_none():
    numbers = (1000 * int("1"), 2000 * int("1"))
    before = [sys.getrefcount(numbers[i]) for i in range(2)]
    with _unharmed(numbers):
        pass
    assert [sys.getrefcount(numbers[i]) for i in range(2)] == before
