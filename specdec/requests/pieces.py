"""A request is read piece by piece as it grows; RequestOutput.add joins pieces to the whole."""

from collections.abc import Iterator
from dataclasses import dataclass

from specdec.requests.output import CompletionOutput, RequestOutput
from specdec.requests.request import Request


@dataclass(slots=True)
class Seen:
    num_chars: int = 0
    num_tokens: int = 0
    num_rounds: int = 0
    cumulative_logprob: float = 0.0
    is_over: bool = False


class Pieces:
    """Reads one request as it grows, every part of it once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._samples = [(sample, Seen()) for sample in request.all_samples]
        self._num_prompt_logprobs = -1  # none have been read, not even an empty list
        self._is_begun = False

    def output(self) -> RequestOutput:
        """Return what is new; the first output alone has the prompt, and has every sample."""
        request = self._request
        is_first = not self._is_begun
        self._is_begun = True
        first = self._samples[0][0]
        prompt_logprobs = None
        has_more = len(first.prompt_logprobs) != self._num_prompt_logprobs
        if request.params.prompt_logprobs is not None and has_more:
            prompt_logprobs = list(first.prompt_logprobs)
            self._num_prompt_logprobs = len(prompt_logprobs)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt if is_first else None,
            prompt_token_ids=list(request.prompt_token_ids) if is_first else [],
            outputs=[_piece(*each) for each in self._samples] if is_first else list(self.new()),
            finished=request.is_finished,
            seed=first.sampling.seed if request.params.temperature > 0 else request.params.seed,
            prompt_logprobs=prompt_logprobs,
        )

    def new(self) -> Iterator[CompletionOutput]:
        """Yield a piece of each sample that has grown or ended."""
        for sample, seen in self._samples:
            if seen.is_over:
                continue
            piece = _piece(sample, seen)
            if piece.text or piece.token_ids or piece.stats.num_rounds or seen.is_over:
                yield piece


def whole_output(request: Request) -> RequestOutput:
    return Pieces(request).output()


def _piece(sample: Request, seen: Seen) -> CompletionOutput:
    text = sample.text()
    piece = CompletionOutput(
        index=sample.index,
        text=text[seen.num_chars :],
        token_ids=sample.token_ids[seen.num_tokens :],
        stats=sample.stats.since(seen.num_rounds),
    )
    if sample.finish is not None:
        piece.finish_reason = sample.finish.reason
        piece.stop_reason = sample.finish.stop_reason
    if sample.params.logprobs is not None:
        piece.logprobs = sample.logprobs[seen.num_tokens :]
        for token, found in zip(piece.token_ids, piece.logprobs, strict=True):
            seen.cumulative_logprob += found[token].logprob
        piece.cumulative_logprob = seen.cumulative_logprob
    seen.num_chars = len(text)
    seen.num_tokens = len(sample.token_ids)
    seen.num_rounds = sample.stats.num_rounds
    seen.is_over = sample.finish is not None
    return piece
