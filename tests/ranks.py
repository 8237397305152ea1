"""Engines of several ranks, which users cannot ask for yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from specdec import llm
from specdec.parallel.ranks import Parallel


@contextmanager
def with_ranks(size: int, compares: bool = True) -> Iterator[None]:
    """Let every LLM that is built in the body have that many ranks; see Parallel."""
    real = llm.load
    llm.load = partial(real, parallel=Parallel(size=size, compares=compares))
    try:
        yield
    finally:
        llm.load = real


def use_two_ranks() -> None:
    """Let every LLM of this process have two ranks, without an end."""
    llm.load = partial(llm.load, parallel=Parallel(size=2))


def marked_processes(mark: str) -> list[int]:
    """Find the processes that run with this word in their environment."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            is_marked = mark.encode() in (directory / "environ").read_bytes()
            state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended, or is not ours
            continue
        if is_marked and state != "Z":
            found.append(int(directory.name))
    return found
