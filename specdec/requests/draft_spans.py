"""The drafts of a sample and what became of them, round by round.

A round is its accepted drafts, then the rejected ones, then the target's own token: recovered after
a rejection, else bonus. Nodes beside an accepted token come before it, a span for each
leaf. Without the rejected drafts the spans are exactly the text and its tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec.requests.draft_tree import leaf_paths
from specdec.requests.output import CompletionOutput
from specdec.requests.stats import RoundRecord
from specdec.requests.tokenizer import Detokenizer, Tokenizer

CONTEXT = 8  # tokens before a rejected draft that its text may depend on


@dataclass(frozen=True, slots=True)
class Span:
    """kind: accepted, rejected, recovered or bonus; target: a token for which none was drafted."""

    text: str
    kind: str
    token_ids: Sequence[int] = ()


@dataclass(slots=True)
class DraftRound:
    """num_drafted, num_accepted: None for the token that the prompt's own pass samples.

    The last round may have accepted more than its spans show: they end where the text ends.
    """

    num_drafted: int | None
    num_accepted: int | None
    spans: list[Span]


class DraftSpans:
    """Follows one sample as it grows. skip_special_tokens: as in its parameters."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._num_tokens = 0
        self._num_rounds = 0
        self._num_chars = 0  # of what was returned
        self._held: list[tuple[int, DraftRound]] = []  # with the characters up to its end

    def new(
        self, completion: CompletionOutput, records: Sequence[RoundRecord], is_over: bool
    ) -> list[DraftRound]:
        """Return the rounds since the last call, once their text is certain; all of them if
        is_over.

        completion, records: the whole sample so far
        """
        for found in self._read(completion.token_ids, records):
            self._held.append((len(self._detokenizer.text), found))
        num_chars = len(completion.text)
        num_ready = sum(is_over or end <= num_chars for end, _ in self._held)
        ready = [found for _, found in self._held[:num_ready]]
        del self._held[:num_ready]
        for found in ready:
            found.spans = list(self._cut(found.spans, completion.text))
        if is_over and self._num_chars < num_chars:  # an incomplete character
            rest = Span(completion.text[self._num_chars :], "target")
            ready.append(DraftRound(None, None, [rest]))
            self._num_chars = num_chars
        return ready

    def _read(self, token_ids: list[int], records: Sequence[RoundRecord]) -> Iterator[DraftRound]:
        if self._num_tokens == 0 and token_ids:
            yield DraftRound(None, None, [self._push("target", token_ids[:1])])
        for record in records[self._num_rounds :]:
            self._num_rounds += 1
            spans = list(self._spans(token_ids, record))
            yield DraftRound(len(record.draft_tokens), record.num_accepted, spans)

    def _spans(self, token_ids: list[int], record: RoundRecord) -> Iterator[Span]:
        tokens = record.draft_tokens
        parents = record.parents or range(len(tokens))  # of a chain
        end = self._num_tokens + record.num_accepted
        row = 0
        accepted: list[int] = []  # since something was beside
        for i in range(self._num_tokens, min(end + 1, len(token_ids))):
            beside = list(_branches(parents, tokens, row, token_ids[i]))
            if beside and accepted:
                yield self._push("accepted", accepted)
                accepted = []
            for branch in beside:
                yield Span(
                    self._text_after(token_ids[max(i - CONTEXT, 0) : i], branch), "rejected", branch
                )
            if i < end:
                accepted.append(token_ids[i])
                nodes = enumerate(zip(parents, tokens, strict=True), start=1)
                row = next(child for child, node in nodes if node == (row, token_ids[i]))
        if accepted:
            yield self._push("accepted", accepted)
        if end < len(token_ids):
            kind = "recovered" if beside else "bonus" if tokens else "target"
            yield self._push(kind, token_ids[end : end + 1])

    def _push(self, kind: str, token_ids: list[int]) -> Span:
        self._num_tokens += len(token_ids)
        return Span("".join(map(self._detokenizer.push, token_ids)), kind, token_ids)

    def _text_after(self, before: list[int], tokens: list[int]) -> str:
        known = self._tokenizer.decode(before)
        whole = self._tokenizer.decode([*before, *tokens])
        return whole[len(known) :] if whole.startswith(known) else self._tokenizer.decode(tokens)

    def _cut(self, spans: list[Span], text: str) -> Iterator[Span]:
        for span in spans:
            if span.kind == "rejected":
                yield span
                continue
            piece = text[self._num_chars : self._num_chars + len(span.text)]
            self._num_chars += len(piece)
            yield Span(piece, span.kind, span.token_ids)


def _branches(
    parents: Sequence[int], draft_tokens: Sequence[int], row: int, token: int
) -> Iterator[list[int]]:
    """Yield the tokens to each leaf under a row, except those under its child `token`."""
    for path in leaf_paths(parents, len(parents)):
        if row in path[:-1]:
            tokens = [draft_tokens[each - 1] for each in path[path.index(row) + 1 :]]
            if tokens[0] != token:
                yield tokens
