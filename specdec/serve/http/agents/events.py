"""What text that arrives in pieces means, as events.

Readers are written as if all of the text were there: as generators of events, which yield None
where they need more of it. What a reader finds does not depend on where the text was cut, since it
decides nothing before it has seen enough. Where max_tokens has ended the text, markup that it cut
off is neither content nor reasoning.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Content:
    """Holds text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Holds what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """Begins a call. index: 0, 1, ... in the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Holds a part of a call's arguments, which joined are JSON unless the model wrote none."""

    index: int
    text: str


Event = Content | Reasoning | Call | Arguments
Result = TypeVar("Result")
Waiting = Generator[None, None, Result]
Reading = Generator[Event | None, None, Result]
Pieces = Generator[str | None, None, None]


class Source:
    """Turns text into events by a reader, for which text[at:] is unread.

    What follows `hold` is kept, to be read again. is_cut: max_tokens has ended the text, so that it
    may end within markup.
    """

    def __init__(self, read: "Callable[[Source], Reading[None]]") -> None:
        self.text = ""
        self.at = 0
        self.is_over = False
        self.is_cut = False
        self._mark: int | None = None
        self._steps = read(self)

    def push(self, text: str) -> Iterator[Event]:
        """Yield what more text means, as far as that is certain."""
        first = self.at if self._mark is None else self._mark
        self.text = self.text[first:] + text  # what was read and is not held is dropped
        self.at -= first
        self._mark = None if self._mark is None else 0
        return self._events()

    def finish(self, is_cut: bool) -> Iterator[Event]:
        """Yield the rest, when the text is over."""
        self.is_over = True
        self.is_cut = is_cut
        return self._events()

    def _events(self) -> Iterator[Event]:
        for event in self._steps:
            if event is None:
                assert not self.is_over, "a reader waits for more than there is"
                return
            yield event

    def hold(self) -> None:
        """Keep what is read from here on."""
        self._mark = self.at

    def release(self) -> str:
        """Return what has been read since `hold`, and keep it no longer."""
        mark, self._mark = self._mark, None
        assert mark is not None, "nothing is held"
        return self.text[mark : self.at]

    def go_back(self) -> None:
        """Unread what has been read since `hold`."""
        self.at -= len(self.release())

    @property
    def is_cut_here(self) -> bool:
        """Tell whether max_tokens has left nothing to read."""
        return self.is_cut and self.at == len(self.text)

    def peek(self) -> Waiting[str]:
        """Return the next character, or nothing at the end."""
        while self.at == len(self.text) and not self.is_over:
            yield None
        return self.text[self.at : self.at + 1]

    def skip(self, others: str = "") -> Waiting[None]:
        """Read white space, and these characters."""
        while (char := (yield from self.peek())) and (char.isspace() or char in others):
            self.at += 1

    def accept(self, word: str) -> Waiting[bool]:
        """Read this word if it is next."""
        while not self.is_over and len(rest := self.text[self.at :]) < len(word):
            if not word.startswith(rest):
                break
            yield None
        is_next = self.text.startswith(word, self.at)
        self.at += len(word) if is_next else 0
        return is_next

    def accept_cut(self, word: str) -> bool:
        """Read the rest if max_tokens has cut it within this word, or before it."""
        is_next = self.is_cut and word.startswith(self.text[self.at :])
        self.at = len(self.text) if is_next else self.at
        return is_next


def merged(events: Iterable[Event]) -> list[Event]:
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if last is None or isinstance(event, Call) or type(last) is not type(event):
            found.append(event)
        elif not isinstance(last, Call):
            found[-1] = replace(last, text=last.text + event.text)
    return found


def read_content(
    source: Source,
    tags: Sequence[str],
    has_calls: bool = False,
    kind: type[Content] | type[Reasoning] = Content,
) -> Reading[str | None]:
    """Read content, or reasoning, up to a tag, which is read too; None at the end of the text.

    White space before the tag belongs to the tag. Both are held. After calls white space alone is
    no content.
    """
    while True:
        cut, tag = _find(source.text, source.at, tags)
        is_end = tag is None and source.is_over
        is_cut = is_end and source.is_cut and is_markup(source.text[cut:], tags, has_calls)
        is_whole = is_end and not is_cut
        piece = source.text[source.at : len(source.text) if is_whole else cut]
        kept = piece if is_whole else piece.rstrip()
        source.at += len(kept)
        has_calls = has_calls and not piece.strip()  # no text has followed them yet
        if kept and not has_calls:
            yield kind(kept)
        if is_end:
            source.at = len(source.text)
            return None
        if tag is not None:
            source.hold()
            source.at = cut + len(tag)
            return tag
        yield None


def read_until(source: Source, tag: str) -> Pieces:
    """Yield the text before a tag, and read the tag, or all text if it does not come."""
    while True:
        cut, found = _find(source.text, source.at, (tag,))
        if found is None and source.is_over:
            is_tag = source.is_cut and is_markup(source.text[cut:], (tag,), True)
            source.text = source.text[:cut] if is_tag else source.text
            cut = len(source.text)
        piece = source.text[source.at : cut]
        source.at = cut + len(found or "")
        if piece:
            yield piece
        if found is not None or source.is_over:
            return
        yield None


def is_markup(rest: str, tags: Sequence[str], any_length: bool = False) -> bool:
    """Tell whether the end of a text is a tag that max_tokens cut, not only a "<" of the text."""
    begun = [tag for tag in tags if rest and tag.startswith(rest)]
    return any(any_length or 2 * len(rest) >= len(tag) for tag in begun)


def joined(pieces: Pieces) -> Waiting[str]:
    text = ""
    for piece in pieces:
        if piece is None:
            yield None
        else:
            text += piece
    return text


def _find(text: str, start: int, tags: Sequence[str]) -> tuple[int, str | None]:
    """Return where the first tag begins; without one, how far no tag can begin."""
    places = [(place, tag) for tag in tags if (place := text.find(tag, start)) >= 0]
    if places:
        return min(places)
    longest = max(map(len, tags), default=1)
    for place in range(max(start, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[place:]) for tag in tags):
            return place, None
    return len(text), None
