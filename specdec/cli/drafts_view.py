"""What was drafted and what became of it, in order, coloured or marked."""

from rich.console import Console
from rich.text import Text

from specdec.requests.draft_spans import DraftSpans, Span
from specdec.requests.output import RequestOutput
from specdec.requests.tokenizer import Tokenizer

# by kind of a span
STYLES = {
    "target": "",
    "accepted": "green",
    "rejected": "dim red strike",
    "recovered": "yellow",
    "bonus": "bold cyan",
}
MARKS = {"accepted": ("{+", "+}"), "rejected": ("[-", "-]")}  # wdiff's, if there are no colours
MEANING = {
    "accepted": "accepted draft",
    "rejected": "rejected draft",
    "recovered": "recovered: the target's token instead",
    "bonus": "bonus: the target's token after K accepted drafts",
}


def draft_spans(output: RequestOutput, tokenizer: Tokenizer) -> list[Span]:
    """The spans of one output; `target` are tokens of prefill and of rounds without drafts."""
    rounds = DraftSpans(tokenizer).new(output.outputs[0], output.stats.rounds, is_over=True)
    return [span for each in rounds for span in each.spans if span.text]


def render_drafts(console: Console, spans: list[Span], prompt: str | None = None) -> None:
    """Print a legend, the prompt and the spans, with marks if the console has no colours."""
    has_colors = console.color_system is not None and not console.no_color
    kinds = {span.kind for span in spans}.intersection(MEANING if has_colors else MARKS)
    shown = [Span(text, kind) for kind, text in MEANING.items() if kind in kinds]
    legend = Text("  ").join(_render(span, has_colors) for span in shown)
    body = Text().join(_render(span, has_colors) for span in spans)
    if legend:
        console.print(legend, end="\n\n")
    if prompt is not None:
        console.print(Text(prompt, style="dim"), end="")
    console.print(body)


def _render(span: Span, has_colors: bool) -> Text:
    text = span.text.replace("\n", "\N{RETURN SYMBOL}") if span.kind == "rejected" else span.text
    if has_colors:
        return Text(text, style=STYLES[span.kind])
    opening, closing = MARKS.get(span.kind, ("", ""))
    return Text(f"{opening}{text}{closing}")
