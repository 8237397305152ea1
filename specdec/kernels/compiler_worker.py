"""Processes that compile kernels for another one: the first imports Triton and forks the others.

They use no GPU. Each has a pipe, on which it gets pickled arguments of triton.compile and answers
with an error's text, b"" for none. What it compiled is in Triton's cache then. They end when the
other ends of the pipes are closed.
"""

import gc
import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from specdec.kernels import kernel_cache, triton


class JobPickler(ForkingPickler):
    """Pickles kernels by name: the other process has the same files."""

    def reducer_override(self, value: object) -> Any:
        return value.__name__ if isinstance(value, triton.JITFunction) else NotImplemented


def main() -> None:
    """Answer on the pipes whose file descriptors are the program's arguments."""
    pipes = [int(descriptor) for descriptor in sys.argv[1:]]
    kernel_cache.triton_key()  # half a second, for all processes
    gc.freeze()  # so that collections do not copy what the processes share
    while pipes:
        own = pipes.pop()
        if os.fork() == 0:
            for other in pipes:
                os.close(other)
            with suppress(EOFError), Connection(own) as pipe:
                while True:
                    pipe.send_bytes(_compile(pipe.recv_bytes()))
            os._exit(0)
        os.close(own)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _compile(job: bytes) -> bytes:
    try:
        source, options = ForkingPickler.loads(job)
        triton.compile(source, **options)
    except Exception as error:  # a compiler's may be of any kind
        return f"{type(error).__name__}: {error}".encode()
    return b""
