"""The one error of this package: it lists every problem of a checkpoint, and nothing is loaded.

Checks collect what is wrong in a `Problems` and go on. A fatal problem ends its stage, because
later checks would only mislead. Names in a checkpoint are untrusted: print them through `shown`.
"""

from collections.abc import Sequence
from pathlib import Path

MOST_LINES = 50  # of an error's text; nothing counts how many more there are
MOST_CHARACTERS = 1000  # of one line


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is; each line of `problems` names file and key."""

    def __init__(self, directory: Path, problems: tuple[str, ...]) -> None:
        self.directory = directory
        self.problems = tuple(shown(problem) for problem in problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        if len(problems) > MOST_LINES:
            count = f"more than {MOST_LINES} problems"
        lines = [f"\n  {line}" for line in listed(self.problems, "- ")]
        super().__init__(f"{shown(str(directory))}: {count}, nothing loaded{''.join(lines)}")

    def __reduce__(self) -> tuple[type["CheckpointError"], tuple[Path, tuple[str, ...]]]:
        """To another process by what it was made of, not by its text."""
        return CheckpointError, (self.directory, self.problems)


class Problems:
    """What is wrong with one checkpoint directory, in the order found, each line once.

    It keeps one line more than an error lists, which says that there are more; checks of many
    things may end once it `is_full`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.is_fatal = False
        self._lines: dict[str, None] = {}  # an ordered set

    @property
    def lines(self) -> list[str]:
        return list(self._lines)

    @property
    def is_full(self) -> bool:
        return len(self._lines) > MOST_LINES

    def add(self, line: str, fatal: bool = False) -> None:
        self.is_fatal = self.is_fatal or fatal
        if not self.is_full:
            self._lines[shown(line)] = None

    def raise_if_fatal(self) -> None:
        if self.is_fatal:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        if self._lines:
            raise CheckpointError(self.directory, tuple(self._lines))


def listed(problems: Sequence[str], mark: str = "") -> list[str]:
    """The lines to print, each after the mark: all problems, or the first ones and "and more"."""
    lines = [f"{mark}{problem}" for problem in problems[:MOST_LINES]]
    return lines if len(problems) <= MOST_LINES else [*lines, "and more"]


def shown(text: str, most: int = MOST_CHARACTERS) -> str:
    """`text` as one printable line of at most `most` characters: escaped, its middle cut out."""
    text = _cut(text, most)
    if text.isprintable():
        return text
    return _cut("".join(char if char.isprintable() else ascii(char)[1:-1] for char in text), most)


def _cut(text: str, most: int) -> str:
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"
