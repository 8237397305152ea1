"""How `specdec generate` writes a text while it grows: as it is, with its drafts, or not at all."""

from typing import Protocol

from specdec.cli.drafts_view import DraftsView
from specdec.requests.draft_spans import DraftSpans
from specdec.requests.output import CompletionOutput
from specdec.requests.pieces import Pieces
from specdec.requests.request import Request
from specdec.requests.stats import RoundRecord
from specdec.requests.tokenizer import Tokenizer


class Writer(Protocol):
    """Follows a request: write() after each step, and end() after the last."""

    def write(self) -> None: ...

    def end(self) -> None: ...


class NoWriter:
    """Writes nothing: all of it is printed once the request has ended."""

    def write(self) -> None: ...

    def end(self) -> None: ...


class TextWriter:
    """Prints the text of one sample."""

    def __init__(self, request: Request) -> None:
        self._pieces = Pieces(request)

    def write(self) -> None:
        """Print what is new."""
        for piece in self._pieces.new():
            print(piece.text, end="", flush=True)

    def end(self) -> None:
        """End the last line."""
        print(flush=True)


class DraftsWriter:
    """Shows the rounds of one sample."""

    def __init__(self, request: Request, tokenizer: Tokenizer, view: DraftsView) -> None:
        self._request = request
        self._spans = DraftSpans(tokenizer)
        self._records: list[RoundRecord] = []
        self._view = view

    def write(self) -> None:
        """Show the rounds whose text is certain."""
        self._show(is_over=self._request.is_finished)

    def end(self) -> None:
        """Show what is left, and end the last line."""
        self._show(is_over=True)
        self._view.end()

    def _show(self, is_over: bool) -> None:
        sample = self._request
        self._records += sample.stats.rounds_after(len(self._records))
        completion = CompletionOutput(sample.index, sample.text(), sample.token_ids)
        self._view.add(self._spans.new(completion, self._records, is_over))
