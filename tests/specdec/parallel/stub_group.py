"""A rank that joins the group, and gathers as often as rank 0 may."""

import pickle
import sys
import threading

import torch

from specdec.parallel.group import Group
from specdec.parallel.shared import Place, Shared, Stage
from tests.specdec.parallel.stub_rank import beat


def main():
    start = pickle.load(sys.stdin.buffer)
    shared = Shared(start["file"], start["size"])
    threading.Thread(target=beat, args=(shared, 1), daemon=True).start()
    group = Group(start["store"], 1, 2, torch.device("cpu"))
    assert group.least(7) == 5
    shared.set(1, Place.STAGE, Stage.SERVING)
    own, found = torch.full((2, 3), 1.5), torch.empty(2, 2, 3)
    while True:
        group.gather(own, found)
