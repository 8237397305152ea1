"""What the scheduler hands to the engine: a step's work, and the state updates it depends on."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.requests.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """Consecutive prompt tokens of one request, at positions start..start + length - 1."""

    state_row: int
    prompt: Sequence[int]  # the whole prompt; after a preemption also the tokens sampled so far
    start: int
    length: int
    blocks: Sequence[int]  # the request's cache blocks
    num_logprobs: int | None = None  # alternatives beside each prompt token, None = no logprobs
    is_resumed: bool = False  # preempted earlier: the last token is sampled already, not computed

    @property
    def ends_prompt(self) -> bool:
        """Whether the next step of the request is a round."""
        return self.start + self.length == len(self.prompt) - self.is_resumed

    @property
    def samples(self) -> bool:
        """Whether this part holds the last prompt token, so that the step samples the next."""
        return self.ends_prompt and not self.is_resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Prompt parts of one step, and their requests."""

    requests: list[Request]
    parts: list[PromptPart]

    def token_bounds(self, b: int) -> tuple[int, int]:
        """The fewest and the most tokens that the step can bring to request b."""
        count = int(self.parts[b].samples)
        return count, count


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All running requests. query_len: rows of each request, 1 where no request drafts."""

    requests: list[Request]
    query_len: int

    def token_bounds(self, b: int) -> tuple[int, int]:
        """The fewest and the most tokens that the step can bring to request b."""
        return 1, self.requests[b].num_speculative_tokens + 1 if self.query_len > 1 else 1


Work = Chunk | Round


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next step and the state updates before it. work: None if nothing can be launched now."""

    admitted: list[Request]
    grown: list[tuple[int, int, int]]  # (state row, block of the request, cache block)
    work: Work | None
