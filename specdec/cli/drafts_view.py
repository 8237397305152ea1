"""What was drafted and what became of it, in order, coloured or marked, as rounds come."""

from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.text import Text

from specdec.cli.figures import COLUMNS
from specdec.requests.draft_spans import DraftRound, DraftSpans, Span
from specdec.requests.output import CompletionOutput
from specdec.requests.request import Request
from specdec.requests.stats import RoundRecord
from specdec.requests.tokenizer import Tokenizer

# the style and the meaning of each kind of a span, beside the target's own tokens
KINDS = {
    "accepted": ("green", "accepted draft"),
    "rejected": ("dim red strike", "rejected draft"),
    "recovered": ("yellow", "recovered: the target's token instead"),
    "bonus": ("bold cyan", "bonus: the target's token after K accepted drafts"),
}
MARKS = {"accepted": ("{+", "+}"), "rejected": ("[-", "-]")}  # wdiff's, if there are no colours
BETWEEN = "  "


class DraftsView:
    """Prints rounds; a legend and the prompt come before the first one that has a text."""

    def __init__(self, console: Console, prompt: str | None = None) -> None:
        self._console = console
        self._prompt = prompt
        self._has_colors = console.color_system is not None and not console.no_color
        self._is_begun = False

    def add(self, rounds: Iterable[DraftRound]) -> None:
        """Print the spans of the next rounds."""
        spans = [span for each in rounds for span in each.spans if span.text]
        if spans and not self._is_begun:
            self._is_begun = True
            for line in self._legend():
                self._console.print(line)
            self._console.print()
            if self._prompt is not None:
                self._console.print(Text(self._prompt, style="dim"), end="")
        self._console.print(Text().join(self._render(span) for span in spans), end="")

    def end(self) -> None:
        """End the last line."""
        self._console.print()

    def following(self, request: Request, tokenizer: Tokenizer) -> Callable[[bool], None]:
        """Show what is new of one sample whenever the result is called; True: it is the end."""
        spans, records = DraftSpans(tokenizer), list[RoundRecord]()

        def show(is_over: bool) -> None:
            records.extend(request.stats.rounds_after(len(records)))
            sample = CompletionOutput(request.index, request.text(), request.token_ids)
            self.add(spans.new(sample, records, is_over or request.is_finished))
            if is_over:
                self.end()

        return show

    def _legend(self) -> Iterator[Text]:
        """Say what the colours or marks mean, in lines of at most 60 columns."""
        line = Text()
        for kind in KINDS if self._has_colors else MARKS:
            each = self._render(Span(KINDS[kind][1], kind))
            if line and len(line) + len(BETWEEN) + len(each) > COLUMNS:
                yield line
                line = Text()
            line = Text(BETWEEN).join([line, each]) if line else each
        yield line

    def _render(self, span: Span) -> Text:
        text = span.text
        if span.kind == "rejected":
            text = text.replace("\n", "\N{RETURN SYMBOL}")
        if self._has_colors:
            style, _ = KINDS.get(span.kind, ("", ""))
            return Text(text, style=style)
        opening, closing = MARKS.get(span.kind, ("", ""))
        return Text(f"{opening}{text}{closing}")
