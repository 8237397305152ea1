"""What was drafted and what became of it, in order, coloured or marked.

A round shows its accepted drafts, then the rejected ones, then the target's own token: recovered
after a rejection, else bonus. Without the rejected drafts the spans are exactly the text.
"""

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from specdec.requests.output import RequestOutput
from specdec.requests.tokenizer import Detokenizer, Tokenizer

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
CONTEXT = 8  # tokens before a rejected draft that its text may depend on


@dataclass(frozen=True, slots=True)
class Span:
    text: str
    kind: str  # a key of STYLES


def draft_spans(output: RequestOutput, tokenizer: Tokenizer) -> list[Span]:
    """The spans of one output; `target` are tokens of prefill and of rounds without drafts."""
    completion = output.outputs[0]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in completion.token_ids]
    spans = [Span("".join(pieces[:1]), "target")]  # empty if the request failed at once
    position = 1
    for record in output.stats.rounds:
        end = min(position + record.num_accepted, len(pieces))
        spans.append(Span("".join(pieces[position:end]), "accepted"))
        if end == len(pieces):
            break
        rejected = list(record.draft_tokens[record.num_accepted :])
        if rejected:
            before = completion.token_ids[:end]
            spans.append(Span(_text_after(tokenizer, before, rejected), "rejected"))
        kind = "recovered" if rejected else "bonus" if record.draft_tokens else "target"
        spans.append(Span(pieces[end], kind))
        position = end + 1
    return _cut(spans, completion.text)


def _text_after(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> str:
    context = before[-CONTEXT:]
    known = tokenizer.decode(context)
    whole = tokenizer.decode([*context, *tokens])
    return whole[len(known) :] if whole.startswith(known) else tokenizer.decode(tokens)


def _cut(spans: list[Span], text: str) -> list[Span]:
    """End where the text ends: without a stop string or token, with an incomplete character."""
    kept: list[Span] = []
    position = 0
    for span in spans:
        if span.kind == "rejected":
            kept.append(span)
            continue
        piece = text[position : position + len(span.text)]
        kept.append(Span(piece, span.kind))
        position += len(piece)
    return [span for span in [*kept, Span(text[position:], "target")] if span.text]


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
