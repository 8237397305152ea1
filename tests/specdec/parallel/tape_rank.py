"""The process of a rank that captures its steps on the tape, as rank 0 does."""

from graphs.tape.backend import TapeBackend
from specdec.parallel import worker
from specdec.start import load

load.graph_backend = lambda *_: TapeBackend()
main = worker.main
