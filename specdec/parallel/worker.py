"""The process of a rank but the first; processes.py starts it.

It ends when rank 0 says so or cannot go on, and when the process of rank 0 has ended. An error ends
it too, with a traceback that rank 0 shows.
"""

import os
import pickle
import signal
import sys
import threading
import time
import traceback

import torch

from specdec.parallel.begin import RankStart
from specdec.parallel.follow import Follow
from specdec.parallel.shared import Place, Shared
from specdec.start.load import load_rank

BEAT_SECONDS = 0.2
REFUSING_SECONDS = 1.0  # that rank 0 may take longer to see what a user gave
FAILED = 1  # exit status
# rank 0 ends in order and says when; a service manager may signal all processes, and a terminal may
# stop a background process that writes to it
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU)


def main() -> None:
    """Read a RankStart from stdin, load, and follow."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    start: RankStart = pickle.load(sys.stdin.buffer)
    shared = Shared(start.file, start.size)
    os.close(start.file)
    beat = threading.Thread(target=_beat, args=(shared, start.rank, start.parent), daemon=True)
    beat.start()
    status = FAILED
    try:
        torch.set_num_threads(start.num_threads)
        follow = Follow(shared, start.rank, start.store, start.compares)
        follow.serve(load_rank(start.found, start.config, follow))
    except SystemExit:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # other ranks wait for the transfers of its last steps
        status = 0
    except BaseException as error:
        if isinstance(error, ValueError):  # rank 0 refuses the same, ends this rank and says so
            time.sleep(REFUSING_SECONDS)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a thread may hang; nothing is left to write


def _beat(shared: Shared, rank: int, parent: int) -> None:
    """Show that the process runs, and end it if rank 0's has ended."""
    beats = 0
    while os.getppid() == parent:
        beats += 1
        shared.set(rank, Place.BEATS, beats)
        time.sleep(BEAT_SECONDS)
    os._exit(FAILED)
