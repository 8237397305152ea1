"""The protocol of grammars that hold a request's text, as the rest of the engine sees it.

guided/grammars.py has the only implementation; here nothing depends on its package.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from specdec.requests.structured_outputs import StructuredOutputsParams


class Walker(Protocol):
    """Finds the masks of a walk, or of a part of it."""

    @property
    def lock(self) -> object:
        """Return what some walkers share: one of them waits for the other."""

    @property
    def walk_seconds(self) -> float:
        """Return the processor time of its latest walk."""

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """List the tokens that may follow: here, and after each draft up to the first that may not.

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
        """Copy the guide at its position."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on by generated tokens, which its masks have allowed."""

    def parts(self, first: int, end: int) -> Sequence[Part]:
        """Split the rows of a walk from `first` up to `end` among threads."""

    @property
    def is_given_up(self) -> bool:
        """Whether `give_up` was called, of it or of another guide of its grammar."""

    @property
    def is_complete(self) -> bool:
        """Whether the text so far may end here."""

    @property
    def error(self) -> str:
        """Name the limit that its masks have met; empty if none."""


class Compiler(Protocol):
    """Compiles grammars, over one tokenizer."""

    def compile(self, kind: str, text: str) -> Guide:
        """Make a guide before the first token; ValueError with the compiler's message."""

    @property
    def num_alive(self) -> int:
        """Count grammars that are still needed."""


class GuideSource(Protocol):
    """Turns grammars into guides. Any thread may call it."""

    def compile(self, params: StructuredOutputsParams) -> Guide:
        """Make a guide before the first token; ValueError with the compiler's message."""

    def check(self, params: StructuredOutputsParams) -> None:
        """Compile it for a server; GrammarsBusyError while it takes no new ones."""
