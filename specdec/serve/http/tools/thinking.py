"""Reasoning in <think> and </think> at the beginning of an answer."""

from specdec.serve.http.tools.events import Content, Reasoning
from specdec.serve.http.tools.source import Reader, Reading, Source, is_markup, read_content

OPEN, CLOSE = "<think>", "</think>"


def opens_thinking(prompt: str) -> bool:
    """Whether a chat template has written the opening tag itself."""
    return prompt.rstrip().endswith(OPEN)


def ends_thinking(prompt: str) -> bool:
    """Whether it has written that there is no reasoning."""
    return prompt.rstrip().endswith(CLOSE)


class ThinkingReader(Reader):
    """is_open: the prompt has the opening tag. Without a closing tag all is reasoning.

    White space around the reasoning is dropped. What follows is content, whatever tags it has.
    """

    def __init__(self, is_open: bool) -> None:
        self._is_open = is_open
        super().__init__()

    def _read(self, source: Source) -> Reading[None]:
        source.hold()
        yield from source.skip()
        has_tag = yield from source.accept(OPEN)
        if has_tag or self._is_open:
            source.release()
            yield from source.skip()
            if (yield from read_content(source, (CLOSE,), kind=Reasoning)) is not None:
                source.release()
            yield from source.skip()
        else:
            source.go_back()
            if source.is_cut and is_markup(source.text[source.at :], (OPEN,)):
                return
        while True:
            text = source.take()
            if text:
                yield Content(text)
            if source.is_over:
                return
            yield None
