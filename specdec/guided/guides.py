"""Guides for requests. llguidance is imported for the first request that asks for one."""

import ctypes
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from specdec.guided.mask_threads import check_few_left
from specdec.requests.structured_outputs import GrammarsBusyError, Guide, StructuredOutputsParams
from specdec.requests.tokenizer import Tokenizer

logger = logging.getLogger("specdec")

NUM_KEPT = 64  # compiled grammars
KEPT_BYTES = 1 << 28  # of the kept grammars: most have about a MiB
MOST_BYTES = 1 << 30  # of the grammars of all requests, from which on servers take no new ones
FEW = 8  # grammars that are taken nevertheless: memory may have grown by something else
INSTALL = 'pip install "specdec[guided]"'


class Compiler(Protocol):
    """What Guides needs of grammars.py, which is imported late."""

    def compile(self, kind: str, text: str) -> Guide: ...

    @property
    def num_alive(self) -> int: ...


class Guides:
    """Compiles grammars over a tokenizer, and keeps the latest. Any thread may call it.

    No library says how large they are, or become with the texts that they allow. So all growth of
    memory since the kept ones were dropped counts as theirs; at KEPT_BYTES all of them are dropped
    again. Requests go on with what they have.

    vocab_size: the target's, maybe padded. eos_token_ids: what may follow a text that is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, str], Guide] = OrderedDict()
        self._compiler: Compiler | None = None
        self._first_bytes = self._least_bytes = 0  # of memory, at the start and since a drop

    def compile(self, params: StructuredOutputsParams) -> Guide:
        """Make a guide before the first token; ValueError with the compiler's message."""
        source = params.source()
        with self._lock:
            found = self._compiled.get(source)
            if self._compiler is None:
                if find_spec("llguidance") is None:
                    raise ValueError(f"structured_outputs needs llguidance: {INSTALL}")
                from specdec.guided.grammars import Grammars

                self._compiler = Grammars(self._tokenizer, self._vocab_size, self._eos_token_ids)
                self._first_bytes = self._least_bytes = resident_bytes()
        if found is None:  # without the lock, which may hold up an engine's steps
            found = self._compiler.compile(*source)
        if found.error:  # another request has shown it
            raise ValueError(f"structured_outputs: {found.error}")
        with self._lock:
            self._compiled[source] = found
            self._compiled.move_to_end(source)
            if len(self._compiled) > NUM_KEPT:
                self._compiled.popitem(last=False)
            now = resident_bytes()
            self._least_bytes = min(self._least_bytes, now)
            if now - self._least_bytes > KEPT_BYTES:
                self._drop_all()
            return found.copy()

    def check(self, params: StructuredOutputsParams) -> None:
        """Compile it for a server, whose clients may be hostile.

        GrammarsBusyError instead, if it is not known, while many masks that take too long are
        still computed, or the grammars of requests have too many bytes.
        """
        with self._lock:
            if params.source() not in self._compiled:
                check_few_left()
                self._check_bytes()
        self.compile(params)

    def _check_bytes(self) -> None:
        if self._compiler is None or resident_bytes() - self._first_bytes <= MOST_BYTES:
            return
        self._drop_all()
        grown = self._least_bytes - self._first_bytes
        count = self._compiler.num_alive
        if grown > MOST_BYTES and count > FEW:
            raise GrammarsBusyError(
                f"{count} grammars of requests have up to {grown >> 20} MiB, with more than "
                f"{MOST_BYTES >> 20} no new one is taken: try again later"
            )

    def _drop_all(self) -> None:
        self._compiled.clear()
        give_back()
        self._least_bytes = resident_bytes()
        logger.debug("compiled grammars are dropped, since memory has grown")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Return free memory to the system, which the C library may have kept."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
