"""Calls as an answer of JSON: {"name": "f", "parameters": {...}}, several of them with ; between.

As Llama 3.1 to 3.3 write them, maybe after <|python_tag|>. An answer that begins otherwise, or an
object that is no call, is content.
"""

from collections.abc import Collection

from specdec.serve.http.tools.events import Content
from specdec.serve.http.tools.json_call import read_call
from specdec.serve.http.tools.source import Reader, Reading, Source, is_markup, read_content

PYTHON_TAG = "<|python_tag|>"


class Llama3JsonReader(Reader):
    """Reads calls from the beginning of an answer on, until there is something else.

    names: of the tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        super().__init__()

    def _read(self, source: Source) -> Reading[None]:
        count = 0
        source.hold()
        yield from source.skip()
        yield from source.accept(PYTHON_TAG)
        yield from source.skip()
        while (yield from source.peek()) == "{":
            if not (yield from read_call(source, count, needs_arguments=True)):
                if source.is_cut and self._begins_call(source.held(), count):
                    source.release()
                    return
                yield Content(source.release())
                source.hold()
                break
            count += 1
            source.hold()
            yield from source.skip(";")
            yield from source.accept(PYTHON_TAG)
            yield from source.skip()
        if count and source.is_over and source.at == len(source.text):
            source.release()  # white space after the last call
            return
        if source.is_cut and self._begins_call(source.held(), count):
            source.take()
            return
        source.go_back()
        yield from read_content(source, ())

    def _begins_call(self, text: str, count: int) -> bool:
        """Whether a call of one of the tools may begin so, or the sign before it.

        After calls whatever has a name is one more: it is no answer in JSON.
        """
        text = "".join(text.split()).lstrip(";")
        if is_markup(text, (PYTHON_TAG,), count > 0):
            return True
        text = text.removeprefix(PYTHON_TAG)
        heads = ['{"name":"'] if count else [f'{{"name":"{name}"' for name in self._names]
        return text != "" and any(text.startswith(head) or head.startswith(text) for head in heads)
