"""Calls as an answer of JSON: {"name": "f", "parameters": {...}}, several of them with ; between.

As Llama 3.1 to 3.3 write them, maybe after <|python_tag|>. An answer that begins otherwise, or an
object that is no call, is content.
"""

from specdec.serve.http.tools.events import Content
from specdec.serve.http.tools.json_call import read_call
from specdec.serve.http.tools.source import Reader, Reading, Source, read_content

PYTHON_TAG = "<|python_tag|>"


class Llama3JsonReader(Reader):
    """Reads calls from the beginning of an answer on, until there is something else."""

    def _read(self, source: Source) -> Reading[None]:
        count = 0
        source.hold()
        yield from source.skip()
        yield from source.accept(PYTHON_TAG)
        yield from source.skip()
        while (yield from source.peek()) == "{":
            if not (yield from read_call(source, count, needs_arguments=True)):
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
        source.go_back()
        yield from read_content(source, ())
