"""A walk that takes too long ends alone; the others are as if it were not there."""

import gc
import os
import threading
import time
import weakref

import pytest

from specdec.guided import mask_threads
from specdec.guided.mask_threads import MaskThreads, Step, Walk
from specdec.requests.structured_outputs import GrammarsBusyError


class FakeGuide:
    """Its masks are its name, with the drafts, after `seconds` of work or once it may stop."""

    def __init__(self, name, seconds=0.0, pause=0.0, stops=True):
        self.name = name
        self.walk_seconds = 0.0
        self.seconds = seconds
        self.pause = pause
        self.reason = ""
        self.thread = None
        self.may_stop = threading.Event()
        self.stops = stops
        self.lock = self

    def masks(self, drafts, first=0):
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
    masks = MaskThreads()
    walks = [Walk(guide, [b"draft"]) for guide in guides]

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
    guide = FakeGuide(b"a", pause=5 * mask_threads.SECONDS)
    assert MaskThreads().masks([Walk(guide, [])]) == [[b"a"]]
    assert guide.reason == ""


def test_several_slow_walks_of_a_step_are_each_given_up():
    guides = [FakeGuide(b"slow", FOREVER), FakeGuide(b"a"), FakeGuide(b"slow", FOREVER)]
    found = MaskThreads().masks([Walk(guide, []) for guide in guides])
    assert found == [[b"none"], [b"a"], [b"none"]]


def test_a_thread_that_goes_on_has_the_lowest_priority():
    guide = FakeGuide(b"slow", FOREVER, stops=False)
    masks = MaskThreads()
    masks.masks([Walk(guide, [])])
    found = os.getpriority(os.PRIO_PROCESS, guide.thread.native_id)
    guide.may_stop.set()
    assert found == 19 > os.getpriority(os.PRIO_PROCESS, 0)
    assert masks.masks([Walk(FakeGuide(b"a"), [])]) == [[b"a"]]


def test_many_threads_left_alone_are_counted_until_they_end(monkeypatch):
    monkeypatch.setattr(mask_threads, "MOST_LEFT", 2)
    monkeypatch.setattr(mask_threads, "_left_alone", [])
    masks = MaskThreads()
    guides = [FakeGuide(b"slow", FOREVER, stops=False) for _ in range(2)]
    for guide in guides:
        mask_threads.check_few_left()
        masks.masks([Walk(guide, [])])
    with pytest.raises(GrammarsBusyError, match="2 masks that take too long"):
        mask_threads.check_few_left()
    guides[0].may_stop.set()
    guides[0].thread.join(10)
    mask_threads.check_few_left()
    guides[1].may_stop.set()


def test_an_error_in_a_walk_reaches_the_caller_and_the_thread_goes_on():
    masks = MaskThreads()
    broken = FakeGuide(b"a", pause="no number")
    with pytest.raises(TypeError):
        masks.masks([Walk(broken, [])])
    assert masks.masks([Walk(FakeGuide(b"b"), [])]) == [[b"b"]]


class Meeting(FakeGuide):
    """Its walk ends once all of a meeting walk at a time."""

    def __init__(self, barrier):
        super().__init__(b"a")
        self.barrier = barrier

    def masks(self, drafts, first=0):
        self.barrier.wait(10)
        return super().masks(drafts)


def meeting(count):
    barrier = threading.Barrier(count)
    return [Meeting(barrier) for _ in range(count)]


def test_short_walks_are_left_to_two_threads(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(mask_threads, "PATIENCE_SECONDS", 10.0)
    guides = [FakeGuide(b"a", pause=0.002) for _ in range(8)]
    MaskThreads().masks([Walk(guide, []) for guide in guides])
    assert len({guide.thread for guide in guides}) <= 2


MS = 0.001


@pytest.mark.parametrize(
    "latest, expected",
    [
        ([0.0] * 8, 2),
        ([0.1 * MS] * 8, 2),
        ([0.5 * MS] * 8, 8),
        ([0.2 * MS] * 8, 4),
        ([2 * MS, *[0.0] * 7], 2),
        ([2 * MS, 2 * MS, *[0.1 * MS] * 6], 3),
        ([5 * MS, *[0.2 * MS] * 7], 2),
    ],
)
def test_a_step_needs_as_many_threads_as_the_latest_walks_say(latest, expected):
    guides = [FakeGuide(b"a") for _ in latest]
    for guide, seconds in zip(guides, latest, strict=True):
        guide.walk_seconds = seconds
    assert Step([Walk(guide, []) for guide in guides]).num_threads_needed == expected


def test_threads_that_a_step_needs_begin_at_once(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(mask_threads, "PATIENCE_SECONDS", 10.0)
    guides = meeting(3)
    for guide in guides:
        guide.walk_seconds = 0.5 * MS
    assert MaskThreads().masks([Walk(guide, []) for guide in guides]) == [[b"a"]] * 3


def test_the_longest_walks_begin_first(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1))
    guides = [FakeGuide(b"%d" % i) for i in range(4)]
    for guide, seconds in zip(guides, (0.1, 0.3, 0.0, 0.2), strict=True):
        guide.walk_seconds = seconds * MS
    begun = []
    monkeypatch.setattr(
        FakeGuide, "masks", lambda self, drafts, first: begun.append(self.name) or [self.name]
    )
    found = MaskThreads().masks([Walk(guide, []) for guide in guides])
    assert begun == [b"1", b"3", b"0", b"2"]
    assert found == [[b"0"], [b"1"], [b"2"], [b"3"]]


def test_walks_of_a_step_run_at_the_same_time_on_as_many_threads_as_there_are(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    masks = MaskThreads()
    guides = meeting(3)
    assert masks.masks([Walk(guide, []) for guide in guides]) == [[b"a"]] * 3
    others = [FakeGuide(b"a", pause=0.001) for _ in range(9)]
    masks.masks([Walk(guide, []) for guide in others])
    assert {guide.thread for guide in others} <= {guide.thread for guide in guides}


def test_guides_that_share_a_lock_take_turns(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    lock = threading.Lock()

    class Sharing(FakeGuide):
        def masks(self, drafts, first=0):
            assert lock.acquire(blocking=False)
            found = super().masks(drafts)
            lock.release()
            return found

    guides = [Sharing(b"%d" % i, pause=0.002) for i in range(6)]
    for guide in guides:
        guide.lock = lock
    found = MaskThreads().masks([Walk(guide, []) for guide in guides])
    assert found == [[b"%d" % i] for i in range(6)]


def test_what_shares_a_lock_with_a_walk_without_end_goes_on_after_it():
    guides = [FakeGuide(b"a"), FakeGuide(b"slow", FOREVER), FakeGuide(b"b")]
    for guide in guides:
        guide.lock = guides[0]
    found = MaskThreads().masks([Walk(guide, []) for guide in guides])
    assert found == [[b"a"], [b"none"], [b"b"]]


def test_walks_that_share_a_lock_are_each_judged_by_their_own_time():
    guides = [FakeGuide(b"%d" % i, 0.6 * mask_threads.SECONDS) for i in range(4)]
    for guide in guides:
        guide.lock = guides[0]
    found = MaskThreads().masks([Walk(guide, []) for guide in guides])
    assert [guide.reason for guide in guides] == [""] * 4
    assert found == [[b"%d" % i] for i in range(4)]


def test_threads_that_a_fork_has_left_behind_are_replaced(monkeypatch):
    masks = MaskThreads()
    masks.masks([Walk(FakeGuide(b"a"), [])])
    [thread] = masks._threads
    monkeypatch.setattr(thread, "is_alive", lambda: False)
    monkeypatch.setattr(masks, "_steps", None)  # what the child has of it is of no use
    guide = FakeGuide(b"b")
    assert masks.masks([Walk(guide, [])]) == [[b"b"]]
    assert guide.thread is not thread


def test_the_threads_end_with_their_owner(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    masks = MaskThreads()
    masks.masks([Walk(guide, []) for guide in meeting(3)])
    threads = masks._threads
    gone = weakref.ref(masks)
    del masks
    gc.collect()
    assert gone() is None
    assert len(threads) == 3
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
