"""Guides for requests. llguidance is imported for the first request that asks for one."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from specdec.guided.mask_threads import check_few_left
from specdec.requests.guide import Guide
from specdec.requests.structured_outputs import StructuredOutputsParams
from specdec.requests.tokenizer import Tokenizer

NUM_KEPT = 64  # compiled grammars
INSTALL = 'pip install "specdec[guided]"'


class Guides:
    """Compiles grammars over a tokenizer, and keeps the latest. Any thread may call it.

    vocab_size: the target's, maybe padded. eos_token_ids: what may follow a text that is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, str], Guide] = OrderedDict()
        self._compiler: Callable[[str, str], Guide] | None = None

    def compile(self, params: StructuredOutputsParams) -> Guide:
        """A guide before the first token; ValueError with the compiler's message."""
        source = params.source()
        with self._lock:
            found = self._compiled.get(source)
            if self._compiler is None:
                self._compiler = self._new_compiler()
        if found is None:  # without the lock, which may hold up an engine's steps
            found = self._compiler(*source)
        if found.error:  # another request has shown it
            raise ValueError(f"structured_outputs: {found.error}")
        with self._lock:
            self._compiled[source] = found
            self._compiled.move_to_end(source)
            if len(self._compiled) > NUM_KEPT:
                self._compiled.popitem(last=False)
            return found.copy()

    def check(self, params: StructuredOutputsParams) -> None:
        """Compile it for a server, whose clients may be hostile.

        GrammarsBusyError instead, if it is not known, while many masks that take too long are
        still computed.
        """
        with self._lock:
            is_known = params.source() in self._compiled
        if not is_known:
            check_few_left()
        self.compile(params)

    def _new_compiler(self) -> Callable[[str, str], Guide]:
        if find_spec("llguidance") is None:
            raise ValueError(f"structured_outputs needs llguidance: {INSTALL}")
        from specdec.guided.grammars import Grammars

        return Grammars(self._tokenizer, self._vocab_size, self._eos_token_ids).compile
