"""What a caller gets back."""

from dataclasses import dataclass, field

from specdec.stats import RequestStats


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence. finish_reason: stop | length | abort | error, None while it runs."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[object] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and what came of it. `prompt` is None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    stats: RequestStats = field(default_factory=RequestStats)
