"""What a caller gets back."""

from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.requests.stats import RequestStats


class Logprob(NamedTuple):
    """As in vLLM: rank 1 is the best."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence. finish_reason: stop | length | abort | error, None while it runs.

    stop_reason: the string or token id that stopped it, or an error's message. logprobs: of each
    token and the best alternatives, by the target's own logits, before any processor.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """As in vLLM. Times are seconds of the host's monotonic clock, None before they come."""

    arrival_time: float
    first_token_time: float | None
    last_token_time: float | None
    first_token_latency: float | None
    num_generation_tokens: int


@dataclass(slots=True)
class RequestOutput:
    """A request and its outputs. `prompt` is None if token ids were given.

    seed: of outputs[0], given or drawn; output i has seed + i. prompt_logprobs: None for the first
    token of the prompt.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    stats: RequestStats = field(default_factory=RequestStats)
    seed: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache."""
        return self.stats.num_cached_tokens

    @property
    def metrics(self) -> RequestMetrics:
        """Times of the request, in vLLM's names."""
        stats = self.stats
        return RequestMetrics(
            arrival_time=stats.arrival_time,
            first_token_time=stats.first_token_time,
            last_token_time=stats.last_token_time,
            first_token_latency=stats.time_to_first_token,
            num_generation_tokens=stats.num_generated_tokens,
        )
