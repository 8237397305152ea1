"""What holds a request's text to a grammar, as the rest of the engine sees it.

guided/grammars.py has the only implementation; here nothing depends on its package.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from specdec.requests.structured_outputs import StructuredOutputsParams


class Walker(Protocol):
    """What can find the masks of a walk, or of a part of it."""

    @property
    def lock(self) -> object:
        """What some walkers have in common: one of them waits for the other."""

    @property
    def walk_seconds(self) -> float:
        """What its latest walk took, of a processor."""

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """Which tokens may follow: here, and after each draft up to the first that may not.

        One bit for each id, the lowest bit of a byte first, in whole 32-bit words.
        """

    def give_up(self, reason: str) -> None:
        """Allow nothing from here on. Another thread may be within `masks`, which goes on there."""


class Part(NamedTuple):
    """Some rows of a walk. Its masks begin with that of row `first`."""

    first: int
    walker: Walker


class Guide(Walker, Protocol):
    """Stands after the tokens that a request has generated."""

    def copy(self) -> "Guide":
        """Another one at the same place."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on by generated tokens, which its masks have allowed."""

    def parts(self, first: int, end: int) -> Sequence[Part]:
        """How several threads may share the rows of a walk from `first` up to `end`."""

    @property
    def is_given_up(self) -> bool:
        """Whether `give_up` was called, of it or of another guide of its grammar."""

    @property
    def is_complete(self) -> bool:
        """Whether the text so far may end here."""

    @property
    def error(self) -> str:
        """The limit that its masks have met; empty if none."""


class Compiler(Protocol):
    """What compiles grammars, over one tokenizer."""

    def compile(self, kind: str, text: str) -> Guide:
        """A guide before the first token; ValueError with the compiler's message."""

    @property
    def num_alive(self) -> int:
        """Grammars that something still needs."""


class GuideSource(Protocol):
    """What turns grammars into guides. Any thread may call it."""

    def compile(self, params: StructuredOutputsParams) -> Guide:
        """A guide before the first token; ValueError with the compiler's message."""

    def check(self, params: StructuredOutputsParams) -> None:
        """Compile it for a server; GrammarsBusyError while it takes no new ones."""
