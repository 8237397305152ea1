"""What the scheduler hands to the engine: a step's work, and the state updates it depends on."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.requests.request import Request
from specdec.sizes import DraftShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """Consecutive prompt tokens of one request, at positions start..start + length - 1."""

    state_row: int
    # the whole prompt; after a preemption also the tokens sampled so far. An array may be given, so
    # that tokens are copied and not iterated
    prompt: Sequence[int]
    start: int
    length: int
    blocks: Sequence[int]  # the request's cache blocks
    num_logprobs: int | None = None  # alternatives beside each prompt token, None = no logprobs
    is_resumed: bool = False  # preempted earlier: the last token is sampled already, not computed

    @property
    def ends_prompt(self) -> bool:
        """Whether the request verifies in its next step."""
        return self.start + self.length == len(self.prompt) - self.is_resumed

    @property
    def samples(self) -> bool:
        """Whether this part holds the last prompt token, so that the step samples the next."""
        return self.ends_prompt and not self.is_resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A step's batch slots: requests that verify, then parts of prompts, those that end first.

    shape: what each that verifies has rows for at most
    shared_rows: if not 0, all rows that verify, which are shared out among these requests
    num_live: levels of the drafts that shared rows verify
    next_shape: what the draft proposes after the step
    """

    verifying: list[Request]
    shape: DraftShape
    shared_rows: int = 0
    num_live: int = 0
    next_shape: DraftShape
    prompts: list[Request]
    parts: list[PromptPart]

    @property
    def requests(self) -> list[Request]:
        return [*self.verifying, *self.prompts]

    @property
    def most_drafts(self) -> int:
        """Bound the drafts that a request may have accepted: at most one for each level."""
        return self.num_live if self.shared_rows else self.shape.path_len - 1

    @property
    def num_verify_rows(self) -> int:
        return self.shared_rows or len(self.verifying) * self.shape.rows

    @property
    def token_bounds(self) -> list[tuple[int, int]]:
        """The fewest and the most tokens that the step can bring to each request."""
        most_drafts = self.most_drafts
        rounds = [(1, 1 + min(each.num_speculative_tokens, most_drafts)) for each in self.verifying]
        return [*rounds, *((int(part.samples),) * 2 for part in self.parts)]


def work_of(verifying: list[Request], shape: DraftShape, next_shape: DraftShape) -> Work:
    """Make work without prompts."""
    return Work(verifying=verifying, shape=shape, next_shape=next_shape, prompts=[], parts=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next step and the state updates before it. work: None if nothing can be launched now."""

    admitted: list[Request]
    grown: list[tuple[int, int, int]]  # (state row, block of the request, cache block)
    work: Work | None
