"""An answer's text as reasoning, content and calls: how one request's answers are read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec.serve.http.tools.definitions import ToolUse
from specdec.serve.http.tools.events import Arguments, Call, Content, Event, Message, merged
from specdec.serve.http.tools.formats import CallFormat
from specdec.serve.http.tools.source import Reader
from specdec.serve.http.tools.thinking import ThinkingReader

NO_TOOLS = ToolUse()


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """calls: None if no calls are read. is_open: the prompt has begun the reasoning."""

    calls: CallFormat | None = None
    use: ToolUse = NO_TOOLS
    thinks: bool = False
    is_open: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self.calls is None and not self.thinks

    def reader(self) -> "MessageReader":
        """For one answer."""
        readers: list[Reader] = [ThinkingReader(self.is_open)] if self.thinks else []
        if self.calls is not None:
            tools = {tool.name: tool for tool in self.use.tools}
            readers.append(self.calls.reader(tools))
        return MessageReader(readers, self.use.most)

    def message(self, text: str, is_cut: bool = False) -> Message:
        """A whole answer. is_cut: by max_tokens."""
        reader = self.reader()
        return Message.of([*reader.push(text), *reader.finish(is_cut)])


class MessageReader:
    """Readers one after another, each of the content that the one before it leaves.

    most: calls that are passed on; None for all.
    """

    def __init__(self, readers: Sequence[Reader], most: int | None = None) -> None:
        self._readers = readers
        self._most = most
        self.num_calls = 0

    def push(self, text: str) -> list[Event]:
        """What more text means, as far as that is certain."""
        events: list[Event] = [Content(text)] if text else []
        for reader in self._readers:
            events = list(_through(reader, events))
        return self._kept(events)

    def finish(self, is_cut: bool = False) -> list[Event]:
        """The rest, when the text is over. is_cut: by max_tokens, perhaps within markup."""
        events: list[Event] = []
        for reader in self._readers:
            events = [*_through(reader, events), *reader.finish(is_cut)]
        return self._kept(events)

    def _kept(self, events: Sequence[Event]) -> list[Event]:
        kept = []
        for event in events:
            if isinstance(event, Call | Arguments):
                if self._most is not None and event.index >= self._most:
                    continue
                self.num_calls += isinstance(event, Call)
            kept.append(event)
        return list(merged(kept))


def _through(reader: Reader, events: Sequence[Event]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Content):
            yield from reader.push(event.text)
        else:
            yield event
