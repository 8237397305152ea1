"""What the text of an answer means, piece by piece, and the whole of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call begins. index: 0, 1, ... in the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of the arguments, which joined are JSON unless the model wrote none."""

    index: int
    text: str


Event = Content | Reasoning | Call | Arguments


@dataclass(slots=True)
class WholeCall:
    """arguments: as text."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """All events of an answer, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[WholeCall] = field(default_factory=list)

    @staticmethod
    def of(events: Iterable[Event]) -> "Message":
        """In order."""
        message = Message()
        for event in events:
            match event:
                case Content(text):
                    message.content += text
                case Reasoning(text):
                    message.reasoning += text
                case Call(_, name):
                    message.calls.append(WholeCall(name))
                case Arguments(index, text):
                    message.calls[index].arguments += text
        return message


def merged(events: Iterable[Event]) -> Iterator[Event]:
    """Neighbours of one kind as one event."""
    last: Event | None = None
    for event in events:
        joined = _joined(last, event)
        if joined is None and last is not None:
            yield last
        last = event if joined is None else joined
    if last is not None:
        yield last


def _joined(first: Event | None, second: Event) -> Event | None:
    match first, second:
        case Content(a), Content(b):
            return Content(a + b)
        case Reasoning(a), Reasoning(b):
            return Reasoning(a + b)
        case Arguments(index, a), Arguments(other, b) if index == other:
            return Arguments(index, a + b)
    return None
