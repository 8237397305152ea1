"""Engines of several ranks, which users cannot ask for yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

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
