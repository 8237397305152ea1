"""Kernels compiled ahead of serving, in parallel; those that requests wait for are counted.

`compiling_ahead` turns launches of the calling thread into requests to compile: nothing runs, and
all kernels are ready when the body has ended.

Triton's compiler mostly holds the lock of its interpreter: threads of one process compile about one
kernel at a time, processes one each. The first process imports Triton and forks the others; they
use no GPU. Each has a pipe, on which it gets pickled arguments of triton.compile and answers with
an error's text, b"" for none. What it compiled is in Triton's cache then. They end when the other
ends of the pipes are closed.
"""

import gc
import hashlib
import io
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, Self

import torch

from specdec.kernels import (
    HAS_TRITON,
    NO_GPU,
    AsyncCompileMode,
    active_mode,
    before_compiling,
    kernel_cache,
    make_backend,
    setting,
    triton,
)
from weights.bars import bar

logger = logging.getLogger("specdec")

MOST_AT_ONCE = 32  # kernels; an engine needs a few hundred, and each process takes memory
WAIT_SECONDS = 0.05  # between looks for a kernel that another process compiles
BAR_DELAY = 0.5  # seconds: what takes less shows no bar
PROGRAM = "from specdec.kernels.compilations import work; work()"
LAUNCHER = "__triton_launcher"  # the module's name of each of Triton's launchers

_is_expected: ContextVar[bool] = ContextVar("_is_expected", default=False)  # of this thread
# a body, or a function, in which compilations are not logged: an engine starts
compiling_is_expected = partial(setting, _is_expected, True)


@cache
def hashing_compiler() -> threading.Thread:
    """Start a thread that hashes Triton's files, for its cache's keys: half a second of a start.

    It holds the interpreter's lock seldom, so it may run beside other work.
    """
    thread = threading.Thread(target=kernel_cache.triton_key, daemon=True)
    thread.start()
    return thread


@contextmanager
def compiling_ahead(
    device: torch.device,
    progress: bool = True,
    may_fail: bool = False,
    elsewhere: Callable[[], bool] | None = None,
) -> Iterator[Callable[[], None]]:
    """Only compile what the body launches. The memory that its kernels would write stays as it was.

    The body may call the yielded function from time to time: launches of a kernel that is ready by
    then are quick, others ask for it again at four times the cost.
    progress: show a bar, if it takes long enough to be seen
    may_fail: a kernel that does not compile or fit raises where it is launched later, not here
    elsewhere: whether another process still compiles the same kernels; this one waits for its own
    """
    hashing_compiler().join()
    count = min(len(os.sched_getaffinity(0)), MOST_AT_ONCE)

    def begin() -> None:
        """Start a thread that waits for the processes, and loads what these have compiled."""
        torch.cuda.set_device(device.index or 0)
        before_compiling.set(processes.prepare)

    def note_ready() -> None:
        """Enter finished kernels in Triton's table, which it does only at the end by itself."""
        for kernel in list(mode.future_kernels.values()):
            if kernel.kernel is None and kernel.future.done():
                kernel.result(ignore_errors=may_fail)

    with (
        CompilerProcesses(count, elsewhere) as processes,
        ThreadPoolExecutor(count, initializer=begin) as pool,
    ):
        # Triton's own mode, which an error would leave in force for all later launches here
        with (
            setting(active_mode, None),
            AsyncCompileMode(pool, ignore_errors=may_fail) as mode,
        ):
            try:
                yield note_ready
                _watch(mode.raw_futures, progress)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                mode.raw_futures.clear()  # it would wait for kernels that never begin
                raise
        # a kernel that did not compile, and may, is None
        first, others = by_launcher(filter(None, (f.kernel for f in mode.future_kernels.values())))
        if LAUNCHER in sys.modules:  # not the first in this process
            first, others = [], first + others
        # what a first launch would do: bring a kernel to the GPU and build its launcher
        for each in [pool.submit(getattr, kernel, "run") for kernel in first]:
            if each.exception() is not None and not may_fail:
                each.result()
        for kernel in others:
            with suppress(Exception) if may_fail else nullcontext():
                _ = kernel.run


def _watch(kernels: Sequence[Future[Any]], progress: bool) -> None:
    """Wait for all kernels. Reading from Triton's cache takes less than the delay of the bar."""
    done = as_completed(kernels)
    options = {"desc": "compiling kernels", "unit": "kernel", "delay": BAR_DELAY}
    for _ in bar(done, total=len(kernels), is_wanted=progress, **options):
        pass


def by_launcher(kernels: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Split kernels into the first of each launcher, and the others.

    Kernels with parameters of the same types in C have one launcher: there a pointer is a pointer,
    whatever it points to. Each launcher is a module of one name, and Python loads such a module
    twice into the module that was loaded last, whichever launcher that is: at that moment a thread
    that reads it gets another kernel's. So only first loads may run at the same time.
    """
    first: dict[tuple[str, ...], Any] = {}
    others = []
    for kernel in kernels:
        types = tuple(map(_type_in_c, kernel.src.signature.values()))
        if first.setdefault(types, kernel) is not kernel:
            others.append(kernel)
    return list(first.values()), others


def _type_in_c(parameter: object) -> str:
    """Name a parameter's type in Triton, with one name for all that a launcher takes alike."""
    name = re.sub(r"\*\w+", "*", str(parameter)).partition("<")[0]
    return re.sub(r"\b([iu])1\b", r"\g<1>8", name).replace("fp32", "f32")


@dataclass(slots=True)
class Compilations:
    """Counts compilations outside `compiling_is_expected`; Triton calls it after each."""

    unexpected: Counter[str] = field(default_factory=Counter)  # by kernel
    is_quiet: bool = False

    def __call__(self, *, fn: Any, **_: object) -> None:
        if not _is_expected.get():
            name = fn.name.rpartition(".")[2]
            self.unexpected[name] += 1
            level = logging.DEBUG if self.is_quiet else logging.WARNING
            logger.log(level, "kernel %s was compiled while requests wait", name)


def compilations() -> Compilations:
    """Return this process's compilations while requests waited, since its first start on a GPU."""
    hook = triton.knobs.runtime.jit_post_compile_hook if HAS_TRITON else None
    return hook if isinstance(hook, Compilations) else Compilations()


def log_compilations(is_quiet: bool = False) -> None:
    """From here on count and log each kernel that is compiled outside `compiling_is_expected`.

    is_quiet: a warm-up compiles some; they are counted
    """
    triton.knobs.runtime.jit_post_compile_hook = hook = compilations()
    hook.is_quiet = is_quiet


class CompilerProcesses:
    """`count` of them, in a process group that Ctrl-C does not reach; the first job starts them.

    At the end of a `with` they have ended. elsewhere: see compiling_ahead
    """

    def __init__(self, count: int, elsewhere: Callable[[], bool] | None = None) -> None:
        self._count = count
        self._elsewhere = elsewhere
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
        is_cached = cached(source, **options)
        while not is_cached() and self._elsewhere is not None and self._elsewhere():
            time.sleep(WAIT_SECONDS)
        if is_cached():
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


def cached(
    source: Any, target: Any, options: Mapping[str, Any], _env_vars: Mapping[str, str]
) -> Callable[[], bool]:
    """Return what says whether triton.compile with these arguments would find it in its cache."""
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options, **source.parse_options()))
    key = kernel_cache.get_cache_key(source, backend, parsed, env_vars=_env_vars)
    entry = kernel_cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return lambda: bool(entry.get_group(f"{source.name[:150]}.json"))


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
            # until the engine ends, or is killed while a kernel compiles
            with suppress(EOFError, ConnectionError), Connection(own) as pipe:
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
