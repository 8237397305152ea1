"""A rank without an engine, whose process begins in a moment: it does what its start says."""

import os
import pickle
import sys
import threading
import time

from specdec.parallel.processes import NO_MULTICAST
from specdec.parallel.shared import Place, Shared, Stage


def main():
    start = pickle.load(sys.stdin.buffer)
    shared = Shared(start["file"], start["size"])
    rank = start["rank"]
    if "is_silent" not in start:
        threading.Thread(target=beat, args=(shared, rank), daemon=True).start()
    print("begins", {name: os.environ.get(name) for name in NO_MULTICAST}, flush=True)
    shared.set(rank, Place.STAGE, Stage.SERVING)
    if "raises" in start:
        raise ValueError(start["raises"])
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.02)


def beat(shared, rank):
    for i in range(10**6):
        shared.set(rank, Place.BEATS, i)
        time.sleep(0.05)
