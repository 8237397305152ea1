"""These are the outputs that a caller gets back."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from specdec.requests.stats import RequestStats


class Logprob(NamedTuple):
    """Holds what vLLM's does: rank 1 is the best."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """Holds one generated sequence.

    finish_reason: stop | length | abort | error, None while it runs.
    stop_reason: the string or token id that stopped it, or an error's message. logprobs: of each
    token and the best alternatives, by the target's own logits, before any processor.
    cumulative_logprob counts from the sample's first token, in a piece too. stats: of this sample;
    a piece has the rounds that brought it, and counts and times so far.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    stats: RequestStats = field(default_factory=RequestStats, compare=False)

    def add(self, later: "CompletionOutput") -> None:
        """Append the piece that the sample wrote next."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        if self.logprobs is not None:
            self.logprobs += later.logprobs or []
        self.cumulative_logprob = later.cumulative_logprob
        self.stats.add(later.stats)

    def copy(self) -> "CompletionOutput":
        """Return a copy that does not grow with this one."""
        return replace(
            self,
            token_ids=list(self.token_ids),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            stats=self.stats.since(0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Has vLLM's fields. Times are seconds of the host's monotonic clock, None before they come."""

    arrival_time: float
    first_token_time: float | None
    last_token_time: float | None
    first_token_latency: float | None
    num_generation_tokens: int


@dataclass(slots=True)
class RequestOutput:
    """Holds a request and its outputs. `prompt` is None if token ids were given.

    seed: of outputs[0], given or drawn; output i has seed + i. prompt_logprobs: None for the first
    token of the prompt. With output_kind DELTA, outputs has only samples that have grown, and
    prompt_logprobs comes once.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def add(self, later: "RequestOutput") -> None:
        """Append the next output of the same request with output_kind DELTA."""
        own = {each.index: each for each in self.outputs}
        for piece in later.outputs:
            if piece.index in own:
                own[piece.index].add(piece)
            else:
                self.outputs.append(piece)
        self.finished = later.finished
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs

    def copy(self) -> "RequestOutput":
        """Return a copy that does not grow with this one; both share what describes the prompt."""
        return replace(self, outputs=[each.copy() for each in self.outputs])

    @property
    def stats(self) -> RequestStats:
        """Put the statistics of its outputs together; with output_kind DELTA, of what is new."""
        if len(self.outputs) == 1:
            return self.outputs[0].stats
        return RequestStats.of_samples([each.stats for each in self.outputs])

    @property
    def num_cached_tokens(self) -> int:
        return self.stats.num_cached_tokens

    @property
    def metrics(self) -> RequestMetrics:
        stats = self.stats
        return RequestMetrics(
            arrival_time=stats.arrival_time,
            first_token_time=stats.first_token_time,
            last_token_time=stats.last_token_time,
            first_token_latency=stats.time_to_first_token,
            num_generation_tokens=stats.num_generated_tokens,
        )
