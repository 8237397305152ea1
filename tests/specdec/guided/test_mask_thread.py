"""A walk that takes too long ends alone; the others are as if it were not there."""

import gc
import os
import threading
import time
import weakref

import pytest

from specdec.guided import mask_thread
from specdec.guided.mask_thread import MaskThread


class FakeGuide:
    """Its masks are its name, with the drafts, after `seconds` of work or once it may stop."""

    def __init__(self, name, seconds=0.0, pause=0.0, stops=True):
        self.name = name
        self.seconds = seconds
        self.pause = pause
        self.reason = ""
        self.thread = None
        self.may_stop = threading.Event()
        self.stops = stops

    def masks(self, drafts):
        if self.reason:
            return [b"none"]
        self.thread = threading.current_thread()
        time.sleep(self.pause)
        end = time.thread_time() + self.seconds
        while time.thread_time() < end and not self.may_stop.is_set():
            pass
        return [self.name, *drafts]

    def give_up(self, reason):
        self.reason = reason
        if self.stops:
            self.may_stop.set()


FOREVER = 1e9


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_walk_without_end_is_given_up_and_the_others_are_not(place):
    guides = [FakeGuide(b"a"), FakeGuide(b"b")]
    guides.insert(place, FakeGuide(b"slow", FOREVER))
    masks = MaskThread()
    walks = [(guide, [b"draft"]) for guide in guides]

    found = masks.masks(walks)

    expected = [[b"a", b"draft"], [b"b", b"draft"]]
    expected.insert(place, [b"none"])
    assert found == expected
    assert [guide.reason for guide in guides if guide.name != b"slow"] == ["", ""]
    assert guides[place].reason == "a mask of its grammar takes more than 50 ms"
    assert masks.masks(walks) == expected
    guides[place].thread.join(10)
    assert not guides[place].thread.is_alive()


def test_what_waits_for_a_busy_machine_is_not_given_up():
    guide = FakeGuide(b"a", pause=5 * mask_thread.SECONDS)
    assert MaskThread().masks([(guide, [])]) == [[b"a"]]
    assert guide.reason == ""


def test_several_slow_walks_of_a_step_are_each_given_up():
    guides = [FakeGuide(b"slow", FOREVER), FakeGuide(b"a"), FakeGuide(b"slow", FOREVER)]
    found = MaskThread().masks([(guide, []) for guide in guides])
    assert found == [[b"none"], [b"a"], [b"none"]]


def test_a_thread_that_goes_on_has_the_lowest_priority():
    guide = FakeGuide(b"slow", FOREVER, stops=False)
    masks = MaskThread()
    masks.masks([(guide, [])])
    found = os.getpriority(os.PRIO_PROCESS, guide.thread.native_id)
    guide.may_stop.set()
    assert found == 19 > os.getpriority(os.PRIO_PROCESS, 0)
    assert masks.masks([(FakeGuide(b"a"), [])]) == [[b"a"]]


def test_an_error_in_a_walk_reaches_the_caller_and_the_thread_goes_on():
    masks = MaskThread()
    broken = FakeGuide(b"a", pause="no number")
    with pytest.raises(TypeError):
        masks.masks([(broken, [])])
    assert masks.masks([(FakeGuide(b"b"), [])]) == [[b"b"]]


def test_the_thread_ends_with_its_owner():
    masks = MaskThread()
    guide = FakeGuide(b"a")
    masks.masks([(guide, [])])
    gone = weakref.ref(masks)
    del masks
    gc.collect()
    assert gone() is None
    guide.thread.join(10)
    assert not guide.thread.is_alive()
