"""Processes that compile kernels: Triton's compiler mostly holds the lock of its interpreter.

Threads of one process compile about one kernel at a time, processes one each. The first imports
Triton and forks the others; they use no GPU. Each has a pipe, on which it gets pickled arguments of
triton.compile and answers with an error's text, b"" for none. What it compiled is in Triton's cache
then. They end when the other ends of the pipes are closed.
"""

import gc
import hashlib
import io
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, Self

from specdec.kernels import NO_GPU, kernel_cache, make_backend, triton

logger = logging.getLogger("specdec")

PROGRAM = "from specdec.kernels.compiler_processes import work; work()"


class CompilerProcesses:
    """`count` of them, in a process group that Ctrl-C does not reach; the first job starts them.

    At the end of a `with` they have ended.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._first: subprocess.Popen[bytes] | None = None
        self._pipes: list[Connection] = []
        self._free: SimpleQueue[Connection] = SimpleQueue()
        self._is_noted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._first is not None:
            os.killpg(self._first.pid, 9)
            self._first.wait()
        for pipe in self._pipes:
            pipe.close()

    def prepare(self, source: Any, **options: Any) -> None:
        """Bring a kernel into Triton's cache, if it is not there. Arguments: of triton.compile.

        If no process could compile it, the caller will, and meet its error.
        """
        if is_cached(source, **options):
            return
        job = io.BytesIO()
        JobPickler(job).dump((source, options))
        try:
            problem = self._compile(job.getvalue())
        except (EOFError, OSError) as error:
            self._note(error)
        else:
            if problem:
                logger.info("kernel %s, compiled in a process of its own: %s", source.name, problem)

    def _compile(self, job: bytes) -> str:
        """Return an error's text, or none. EOFError or OSError where the process has ended."""
        self._start()
        pipe = self._free.get()
        try:
            pipe.send_bytes(job)
            return pipe.recv_bytes().decode()
        finally:
            self._free.put(pipe)

    def _note(self, error: Exception) -> None:
        """Log an error once: where memory is short, processes may end one after another."""
        with self._lock:
            if not self._is_noted:
                line = "a process that compiles kernels has ended (%s: %s): this one does its work"
                logger.warning(line, type(error).__name__, error)
            self._is_noted = True

    def _start(self) -> None:
        """Start once. The pipes of processes that do not start are closed at their ends."""
        with self._lock:
            if self._pipes:
                return
            pairs = [socket.socketpair() for _ in range(self._count)]
            theirs = [their.fileno() for _, their in pairs]
            path = os.pathsep.join(directory for directory in sys.path if directory)
            # the processes find the same modules and the same cache
            same = {"PYTHONPATH": path, "TRITON_CACHE_DIR": triton.knobs.cache.dir, NO_GPU: "1"}
            try:
                self._first = subprocess.Popen(
                    [sys.executable, "-P", "-c", PROGRAM, *map(str, theirs)],
                    pass_fds=theirs,
                    env=os.environ | same,
                    process_group=0,
                )
            finally:
                for our, their in pairs:
                    their.close()
                    self._pipes.append(Connection(our.detach()))
                    self._free.put(self._pipes[-1])


def is_cached(
    source: Any, target: Any, options: Mapping[str, Any], _env_vars: Mapping[str, str]
) -> bool:
    """Whether triton.compile with these arguments would find the kernel in its cache."""
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options, **source.parse_options()))
    key = kernel_cache.get_cache_key(source, backend, parsed, env_vars=_env_vars)
    entry = kernel_cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return bool(entry.get_group(f"{source.name[:150]}.json"))


class JobPickler(ForkingPickler):
    """Pickles kernels by name: the other process has the same files."""

    def reducer_override(self, value: object) -> Any:
        return value.__name__ if isinstance(value, triton.JITFunction) else NotImplemented


def work() -> None:
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
