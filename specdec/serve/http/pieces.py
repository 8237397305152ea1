"""What a request has written since the last look, from outputs that hold the whole of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec.requests.draft_spans import DraftRound
from specdec.requests.output import CompletionOutput, Logprob, RequestOutput

LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class Piece:
    """A part of one choice.

    token_ids and logprobs are those of the part; finish_reason is None but at the end. rounds:
    what was drafted, if the request asks for it; a round comes once its text is certain.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None
    is_first: bool
    rounds: Sequence[DraftRound] = ()


class Pieces:
    """Of one request. withholds_tokens: a part without text is kept until there is some."""

    def __init__(self, num_samples: int, withholds_tokens: bool) -> None:
        self._withholds_tokens = withholds_tokens
        self._num_chars = [0] * num_samples
        self._num_tokens = [0] * num_samples
        self._is_begun = [False] * num_samples
        self._is_over = [False] * num_samples

    def new(self, output: RequestOutput) -> Iterator[Piece]:
        """Of each choice that has grown or ended."""
        for completion in output.outputs:
            i = completion.index
            has_text = len(completion.text) > self._num_chars[i]
            has_tokens = len(completion.token_ids) > self._num_tokens[i]
            is_over = completion.finish_reason is not None
            is_new = has_text or is_over or (has_tokens and not self._withholds_tokens)
            if is_new and not self._is_over[i]:
                yield self._piece(completion)

    def _piece(self, completion: CompletionOutput) -> Piece:
        i = completion.index
        first = self._num_tokens[i]
        token_ids = completion.token_ids[first:]
        logprobs = None if completion.logprobs is None else completion.logprobs[first:]
        piece = Piece(
            index=i,
            text=completion.text[self._num_chars[i] :],
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            is_first=not self._is_begun[i],
        )
        self._num_chars[i] = len(completion.text)
        self._num_tokens[i] = len(completion.token_ids)
        self._is_begun[i] = True
        self._is_over[i] = completion.finish_reason is not None
        return piece


def clamped(value: float) -> float:
    """A logprob that JSON can hold."""
    return max(value, LEAST_LOGPROB)


def best(found: dict[int, Logprob], count: int) -> list[int]:
    """The ids of the best alternatives at one position, in order."""
    ranked = sorted(found, key=lambda token: found[token].rank)
    return [token for token in ranked if found[token].rank <= count]
