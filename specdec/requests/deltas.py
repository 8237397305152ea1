"""What a request has written since the last look: joined, the pieces are the whole output."""

from collections.abc import Iterator
from dataclasses import dataclass

from specdec.requests.output import CompletionOutput
from specdec.requests.request import Request


@dataclass(slots=True)
class Seen:
    """How much of a sample has been yielded."""

    num_chars: int = 0
    num_tokens: int = 0
    is_over: bool = False


class Deltas:
    """Reads the samples of one request as they grow."""

    def __init__(self, request: Request) -> None:
        self._samples = [(sample, Seen()) for sample in request.all_samples]

    def new(self) -> Iterator[CompletionOutput]:
        """The new text, tokens and logprobs of each sample that has some, or that has ended."""
        for sample, seen in self._samples:
            if seen.is_over:
                continue
            text = sample.text()
            num_tokens = len(sample.token_ids)
            seen.is_over = sample.finish is not None
            if len(text) > seen.num_chars or num_tokens > seen.num_tokens or seen.is_over:
                yield self._piece(sample, seen, text)
            seen.num_chars = len(text)
            seen.num_tokens = num_tokens

    def _piece(self, sample: Request, seen: Seen, text: str) -> CompletionOutput:
        finish = sample.finish
        return CompletionOutput(
            index=sample.index,
            text=text[seen.num_chars :],
            token_ids=sample.token_ids[seen.num_tokens :],
            finish_reason=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop_reason,
            logprobs=None if sample.params.logprobs is None else sample.logprobs[seen.num_tokens :],
        )
