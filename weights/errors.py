"""The one error of this package. A checkpoint with three faults is reported once, with all three; nothing is loaded.

Checks collect what is wrong in a `Problems` and go on. A fatal problem ends its stage: what follows would only mislead.
"""

from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is; `problems` holds one line each, naming file and key."""

    def __init__(self, directory: Path, problems: tuple[str, ...]) -> None:
        self.directory = directory
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"{directory}: {count}, nothing loaded{lines}")


class Problems:
    """What is wrong with one checkpoint directory, in the order found, each line once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lines: list[str] = []
        self.is_fatal = False

    def add(self, line: str, fatal: bool = False) -> None:
        self.is_fatal = self.is_fatal or fatal
        if line not in self.lines:
            self.lines.append(line)

    def raise_if_fatal(self) -> None:
        if self.is_fatal:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        if self.lines:
            raise CheckpointError(self.directory, tuple(self.lines))
