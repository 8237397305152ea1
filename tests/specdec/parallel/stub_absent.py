"""A rank that says it is ready to meet the others, and ends before it does."""

import os
import pickle
import sys

from specdec.parallel.ring import Reader
from specdec.parallel.shared import Place, Shared, Stage


def main():
    start = pickle.load(sys.stdin.buffer)
    shared = Shared(start["file"], start["size"])
    shared.set(1, Place.STAGE, Stage.JOINING)
    Reader(shared, 1).receive()
    os._exit(9)
