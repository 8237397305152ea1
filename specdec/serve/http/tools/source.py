"""Text that arrives in pieces, for readers that are written as if all of it were there.

A reader is a generator that yields events, and None where it needs more text. What it has read
does not depend on where the text was cut, since it decides nothing before it has seen enough.
Where max_tokens has ended the text, markup that it cut off is neither content nor reasoning.
"""

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TypeVar

from specdec.serve.http.tools.events import Content, Event, Reasoning, merged

Result = TypeVar("Result")
Waiting = Generator[None, None, Result]
Reading = Generator[Event | None, None, Result]


class Source:
    """text[at:] is unread. Text from `hold` on is kept, to be read again or passed on.

    is_cut: max_tokens has ended the text, so that it may end within markup.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_over = False
        self.is_cut = False
        self._mark: int | None = None

    def add(self, text: str) -> None:
        """More text; what was read and is not held is dropped."""
        first = self.at if self._mark is None else self._mark
        self.text = self.text[first:] + text
        self.at -= first
        self._mark = None if self._mark is None else 0

    def hold(self) -> None:
        """Keep what is read from here on."""
        self._mark = self.at

    def held(self) -> str:
        """All text from `hold` on."""
        assert self._mark is not None, "nothing is held"
        return self.text[self._mark :]

    def release(self) -> str:
        """What has been read since `hold`."""
        assert self._mark is not None, "nothing is held"
        held = self.text[self._mark : self.at]
        self._mark = None
        return held

    def go_back(self) -> None:
        """Unread what is held."""
        assert self._mark is not None, "nothing is held"
        self.at = self._mark
        self._mark = None

    @property
    def is_cut_here(self) -> bool:
        """Whether max_tokens has left nothing to read."""
        return self.is_cut and self.at == len(self.text)

    def take(self) -> str:
        """All unread text that is there."""
        taken = self.text[self.at :]
        self.at = len(self.text)
        return taken

    def peek(self) -> Waiting[str]:
        """The next character; none at the end."""
        while self.at == len(self.text) and not self.is_over:
            yield None
        return self.text[self.at : self.at + 1]

    def skip(self, others: str = "") -> Waiting[None]:
        """Read white space, and these characters."""
        pattern = re.compile(rf"[\s{others}]*")
        while True:
            found = pattern.match(self.text, self.at)
            assert found is not None, "the pattern fits nothing too"
            self.at = found.end()
            if self.at < len(self.text) or self.is_over:
                return
            yield None

    def accept(self, word: str) -> Waiting[bool]:
        """Read this word if it is next."""
        while not self.is_over and word.startswith(self.text[self.at : self.at + len(word)]):
            if len(self.text) - self.at >= len(word):
                break
            yield None
        is_next = self.text.startswith(word, self.at)
        self.at += len(word) if is_next else 0
        return is_next

    def accept_cut(self, word: str) -> bool:
        """Read the rest if it is the beginning of this word, cut off by max_tokens."""
        rest = self.text[self.at :]
        is_next = self.is_cut and rest != "" and word.startswith(rest)
        self.at += len(rest) if is_next else 0
        return is_next


class Reader:
    """Turns text into events. A subclass has the generator."""

    def __init__(self) -> None:
        self._source = Source()
        self._steps = self._read(self._source)

    def push(self, text: str) -> list[Event]:
        """What more text means, as far as that is certain."""
        self._source.add(text)
        return list(merged(self._events()))

    def finish(self, is_cut: bool = False) -> list[Event]:
        """The rest, when the text is over. is_cut: by max_tokens."""
        self._source.is_over = True
        self._source.is_cut = is_cut
        return list(merged(self._events()))

    def _events(self) -> Iterator[Event]:
        for event in self._steps:
            if event is None:
                assert not self._source.is_over, "a reader waits for more than there is"
                return
            yield event

    def _read(self, source: Source) -> Reading[None]:
        raise NotImplementedError


def read_content(
    source: Source,
    tags: Sequence[str],
    has_calls: bool = False,
    kind: type[Content] | type[Reasoning] = Content,
) -> Reading[str | None]:
    """Content, or reasoning, up to a tag, which is read too; None at the end of the text.

    White space before the tag belongs to the tag. Both are held. After calls white space alone is
    no content.
    """
    while True:
        cut, tag = find(source.text, source.at, tags)
        is_end = tag is None and source.is_over
        is_cut = is_end and source.is_cut and is_markup(source.text[cut:], tags, has_calls)
        piece = source.text[source.at : len(source.text) if is_end and not is_cut else cut]
        kept = piece if is_end and not is_cut else piece.rstrip()
        source.at += len(kept)
        has_calls = has_calls and not piece.strip()  # no text has followed them yet
        if kept and not has_calls:
            yield kind(kept)
        if is_end:
            source.take()
            return None
        if tag is not None:
            source.hold()
            source.at = cut + len(tag)
            return tag
        yield None


def read_until(source: Source, tag: str) -> Generator[str | None, None, bool]:
    """The text before a tag in pieces, and the tag; False if the text ends before it."""
    while True:
        cut, found = find(source.text, source.at, (tag,))
        if found is None and source.is_over:
            is_tag = source.is_cut and is_markup(source.text[cut:], (tag,), True)
            source.text = source.text[:cut] if is_tag else source.text
            cut = len(source.text)
        piece = source.text[source.at : cut]
        source.at = cut + len(found or "")
        if piece:
            yield piece
        if found is not None or source.is_over:
            return found is not None
        yield None


def is_markup(rest: str, tags: Sequence[str], any_length: bool = False) -> bool:
    """Whether the end of a text is a tag that max_tokens cut, and not only a "<" of the text."""
    begun = [tag for tag in tags if rest and tag.startswith(rest)]
    return any(any_length or 2 * len(rest) >= len(tag) for tag in begun)


def joined(pieces: Iterable[str | None]) -> Waiting[str]:
    """All pieces."""
    text = ""
    for piece in pieces:
        if piece is None:
            yield None
        else:
            text += piece
    return text


def find(text: str, start: int, tags: Sequence[str]) -> tuple[int, str | None]:
    """Where the first tag begins; without one, how far no tag can begin."""
    places = [(place, tag) for tag in tags if (place := text.find(tag, start)) >= 0]
    if places:
        return min(places)
    longest = max(map(len, tags), default=1)
    for place in range(max(start, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[place:]) for tag in tags):
            return place, None
    return len(text), None
