"""Special tokens that a user writes in a conversation, told from those of the chat template.

A mark within each of them, put there before the template is rendered, shows afterwards whose it is.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

MARK = "\ufdd0"  # Unicode keeps it for such uses: no text has it


@dataclass(frozen=True, slots=True)
class MarkedText:
    """places: where marks were, in order."""

    text: str
    places: list[int]

    @staticmethod
    def of(rendered: str) -> "MarkedText":
        """Split off the marks of a rendered text."""
        *pieces, last = rendered.split(MARK)
        return MarkedText("".join([*pieces, last]), list(accumulate(map(len, pieces))))

    def is_marked(self, start: int, end: int) -> bool:
        """Whether a mark was within this part of the text."""
        index = bisect_right(self.places, start)
        return index < len(self.places) and self.places[index] < end


class SpecialMarks:
    """tokens: texts of special tokens. A single character has no room for a mark."""

    def __init__(self, tokens: Collection[str]) -> None:
        longest_first = sorted((each for each in tokens if len(each) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._beginnings = {each[:end] for each in longest_first for end in range(1, len(each))}
        self._most = max(map(len, longest_first), default=1)

    def put(self, value: object) -> object:
        """Put a mark within each special token in the texts of a conversation's value."""
        match value:
            case str():
                return "".join(self._marked(value.replace(MARK, "")))
            case Mapping():
                return {self.put(key): self.put(each) for key, each in value.items()}
            case list() | tuple():
                return [self.put(each) for each in value]
        return value

    def _marked(self, text: str) -> Iterator[str]:
        """Mark a text in pieces; its end, too, where a token begins that another text may end."""
        start = 0
        while found := self._pattern.search(text, start):
            yield text[start : found.start() + 1] + MARK
            start = found.start() + 1  # others may overlap it
        yield text[start:]
        if any(text[-count:] in self._beginnings for count in range(1, self._most)):
            yield MARK
