"""Calls in tags: <tool_call>{"name": "f", "arguments": {...}}</tool_call>, as Hermes and Qwen do.

Text that begins like a call and is none stays content.
"""

from specdec.serve.http.tools.events import Content
from specdec.serve.http.tools.json_call import read_call
from specdec.serve.http.tools.source import Reader, Reading, Source, Waiting, read_content

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesReader(Reader):
    """A call without a closing tag is one too."""

    def _read(self, source: Source) -> Reading[None]:
        count = 0
        while (yield from read_content(source, (OPEN,), count > 0)) is not None:
            yield from source.skip()
            is_object = (yield from source.peek()) == "{"
            is_call: bool | None = None if source.is_cut_here else False
            if is_object:
                is_call = yield from read_call(source, count, needs_arguments=False)
            if is_call:
                count += 1
                yield from skip_tag(source, CLOSE)
            elif is_call is None:
                source.release()
            else:
                yield Content(source.release())


def skip_tag(source: Source, tag: str) -> Waiting[None]:
    """Read a tag that may be next, and white space before it."""
    source.hold()
    yield from source.skip()
    if (yield from source.accept(tag)) or source.accept_cut(tag):
        source.release()
    else:
        source.go_back()
