"""Messages arrive whole and in order at every reader, however long they are."""

import os
import threading
import time

import pytest

from specdec.parallel import shared as memory
from specdec.parallel.ring import HEADER, Reader, Writer
from specdec.parallel.shared import RING_BYTES, Place, Shared


@pytest.fixture
def shared():
    found = Shared.of(3)
    os.close(found.file)
    return found


def received(shared, rank, count, into, pause=0.0):
    reader = Reader(shared, rank)
    for _ in range(count):
        into.append(reader.receive())
        time.sleep(pause)


def test_every_reader_gets_all_messages_in_order(shared):
    sizes = [0, 1, 700, RING_BYTES - HEADER.size, RING_BYTES, 3, 2 * RING_BYTES + 5, 900] + [
        50
    ] * 99
    messages = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    found = {1: [], 2: []}
    threads = [
        threading.Thread(target=received, args=(shared, rank, len(messages), into, 0.0005 * rank))
        for rank, into in found.items()
    ]
    for thread in threads:
        thread.start()
    writer = Writer(shared)
    for message in messages:
        writer.send(message)
    for thread in threads:
        thread.join(30)
    assert found == {1: messages, 2: messages}


def test_a_lost_message_is_noticed(shared):
    writer, reader = Writer(shared), Reader(shared, 1)
    writer.send(b"first")
    writer._number += 1
    writer.send(b"third")
    assert reader.receive() == b"first"
    with pytest.raises(RuntimeError, match="message 1 of rank 0 is lost: 2 came instead"):
        reader.receive()


def test_a_full_ring_waits_and_looks_whether_readers_live(shared):
    looks = []

    def check():
        looks.append(1)
        if len(looks) > 3:
            raise ConnectionError("rank 2 has ended")

    writer = Writer(shared, check)
    writer.send(bytes(RING_BYTES // 2))
    Reader(shared, 1).receive()  # the other one does not read
    with pytest.raises(ConnectionError, match="rank 2"):
        writer.send(bytes(RING_BYTES))


def test_a_reader_wakes_soon_and_sleeps_when_it_waits_long(shared, monkeypatch):
    monkeypatch.setattr(memory, "IDLE_SECONDS", 0.05)
    naps = []
    real = time.sleep
    monkeypatch.setattr(memory.time, "sleep", lambda s: (naps.append(s), real(s)))
    found = []
    thread = threading.Thread(target=received, args=(shared, 1, 1, found))
    thread.start()
    real(0.15)
    assert set(naps) == {memory.SHORT_SECONDS, memory.LONG_SECONDS}
    shared.set(2, Place.READ, 10**6)
    Writer(shared).send(b"x")
    thread.join(5)
    assert found == [b"x"]


def test_numbers_of_a_rank_are_its_own(shared):
    shared.set(1, Place.STAGE, (1 << 64) - 1)
    shared.set(2, Place.FIRST_DIGEST + memory.NUM_DIGESTS - 1, 7)
    assert shared.get(1, Place.STAGE) == (1 << 64) - 1
    assert [shared.get(rank, Place.READ) for rank in range(3)] == [0, 0, 0]
    assert bytes(shared.ring[:64]) == bytes(64)
