"""What was drafted and what came of it, in the order in which it happened, coloured or marked.

A round shows its accepted drafts, then the rejected ones, then the target's own token: recovered behind a rejection,
bonus behind none. Without the rejected ones the spans are exactly the text.
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
MARKS = {
    "accepted": ("{+", "+}"),
    "rejected": ("[-", "-]"),
}  # as wdiff writes them, where there are no colours
MEANING = {
    "accepted": "accepted draft",
    "rejected": "rejected draft",
    "recovered": "recovered: the target's token instead",
    "bonus": "bonus: the target's token behind K accepted drafts",
}
CONTEXT = 8  # tokens before a rejected draft that its text may depend on


@dataclass(frozen=True, slots=True)
class Span:
    text: str
    kind: str  # a key of STYLES


def draft_spans(output: RequestOutput, tokenizer: Tokenizer) -> list[Span]:
    """The spans of one output; `target` are tokens of prefill and of rounds without drafts."""
    token_ids, text = output.outputs[0].token_ids, output.outputs[0].text
    pieces, detokenizer = [], Detokenizer(tokenizer)
    for token in token_ids:
        pieces.append(detokenizer.push(token))
    spans, position = (
        [Span("".join(pieces[:1]), "target")],
        1,
    )  # none, where the request failed at once
    for record in output.stats.rounds:
        end = min(position + record.num_accepted, len(pieces))
        spans.append(Span("".join(pieces[position:end]), "accepted"))
        if end == len(pieces):
            break
        rejected = list(record.draft_tokens[record.num_accepted :])
        if rejected:
            spans.append(Span(_text_behind(tokenizer, token_ids[:end], rejected), "rejected"))
        kind = "recovered" if rejected else "bonus" if record.draft_tokens else "target"
        spans.append(Span(pieces[end], kind))
        position = end + 1
    return _cut(spans, text)


def _text_behind(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> str:
    context = before[-CONTEXT:]
    known, whole = tokenizer.decode(context), tokenizer.decode([*context, *tokens])
    return whole[len(known) :] if whole.startswith(known) else tokenizer.decode(tokens)


def _cut(spans: list[Span], text: str) -> list[Span]:
    """End where the text ends: a stop string or stop token is not part of it, an incomplete character is."""
    kept, position = [], 0
    for span in spans:
        if span.kind == "rejected":
            kept.append(span)
            continue
        piece = text[position : position + len(span.text)]
        kept.append(Span(piece, span.kind))
        position += len(piece)
    return [span for span in [*kept, Span(text[position:], "target")] if span.text]


def render_drafts(console: Console, spans: list[Span], prompt: str | None = None) -> None:
    """Print a legend, the prompt and the spans; marks stand for colours where the console has none."""
    has_colors = console.color_system is not None and not console.no_color
    shown = [
        kind
        for kind in MEANING
        if any(span.kind == kind for span in spans) and (has_colors or kind in MARKS)
    ]
    legend = Text("  ").join(_render(Span(MEANING[kind], kind), has_colors) for kind in shown)
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
    before, behind = MARKS.get(span.kind, ("", ""))
    return Text(f"{before}{text}{behind}")
