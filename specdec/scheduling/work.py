"""What the scheduler hands to the engine: the work of one step, and what the state has to learn before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from specdec.requests.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """Consecutive prompt tokens of one request, at positions start..start + length - 1."""

    state_row: int  # request row of the state
    prompt: Sequence[int]  # the whole prompt; after a preemption also the tokens sampled so far
    start: int
    length: int
    blocks: Sequence[int]  # the request's cache blocks
    num_logprobs: int | None = None  # alternatives beside each prompt token, None = no logprobs
    is_resumed: bool = (
        False  # after a preemption: the last token was sampled before, and is not computed here
    )

    @property
    def ends_prompt(self) -> bool:
        """Whether the next step of the request is a round."""
        return self.start + self.length == len(self.prompt) - self.is_resumed

    @property
    def samples(self) -> bool:
        """Whether this part holds the last prompt token, and the step samples the token after it."""
        return self.ends_prompt and not self.is_resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Prompt parts of one step, and their requests."""

    requests: list[Request]
    parts: list[PromptPart]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Everything that runs. query_len: rows of each request, 1 where nobody drafts."""

    requests: list[Request]
    query_len: int


Work = Chunk | Round
AnyWork = TypeVar("AnyWork", Chunk, Round)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next step, and what the state has to learn before it. work: None where nothing can be launched now."""

    admitted: list[Request]
    grown: list[tuple[int, int, int]]  # (state row, block of the request, cache block)
    work: Work | None
