"""What the scheduler decides: the rows of a step, whose they are, and the state updates before it.

A step is described in three layers. A Round is rows: which state rows verify what, which parts of
prompts ride, and what is proposed next. Work is a round whose requests are known. A Step is a round
with the graphs that run it (rounds/step_sizes.py). Accepted counts stay on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.requests.request import Request
from specdec.sizes import PLAIN, DraftShape


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
class Round:
    """What a step computes: a verify slot for each of `state_rows`, then slots of `parts`.

    shape: what each verify slot has rows for at most
    shared_rows: 0: each verify slot has shape.rows rows; else the rows of all verify slots, which
        are dealt out so that each has 1 to shape.rows
    next_shape: what the draft proposes after the step; PLAIN: it extends its KV; IDLE: not even so
    """

    state_rows: Sequence[int] = ()
    shape: DraftShape = PLAIN
    shared_rows: int = 0
    next_shape: DraftShape
    parts: Sequence[PromptPart] = ()

    @property
    def num_verified(self) -> int:
        return len(self.state_rows)

    @property
    def num_verify_rows(self) -> int:
        return self.shared_rows or len(self.state_rows) * self.shape.rows

    @property
    def num_reqs(self) -> int:
        return len(self.state_rows) + len(self.parts)

    @property
    def num_prompt_rows(self) -> int:
        return sum(part.length for part in self.parts)

    @property
    def num_tokens(self) -> int:
        return self.num_verify_rows + self.num_prompt_rows

    @property
    def num_decided(self) -> int:
        """Count the rows after which a token is chosen: all that verify, and each part's last."""
        return self.num_verify_rows + len(self.parts)

    @property
    def proposes(self) -> bool:
        """Whether the draft proposes tokens: not where prompts go on and nothing else runs."""
        has_seed = len(self.state_rows) > 0 or any(part.ends_prompt for part in self.parts)
        return self.next_shape.nodes > 0 and has_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Round):
    """A round with its requests: those that verify, then those of the parts.

    Every part but the last ends its prompt.

    num_live: levels of the drafts that shared rows verify
    """

    verifying: list[Request]
    prompts: list[Request]
    parts: list[PromptPart]
    num_live: int = 0

    @property
    def requests(self) -> list[Request]:
        return [*self.verifying, *self.prompts]

    @property
    def most_drafts(self) -> int:
        """Bound the drafts that a request may have accepted: at most one for each level."""
        return self.num_live if self.shared_rows else self.shape.path_len - 1

    @property
    def token_bounds(self) -> list[tuple[int, int]]:
        """The fewest and the most tokens that the step can bring to each request."""
        most_drafts = self.most_drafts
        rounds = [(1, 1 + min(each.num_speculative_tokens, most_drafts)) for each in self.verifying]
        return [*rounds, *((int(part.samples),) * 2 for part in self.parts)]


def work_of(verifying: list[Request], shape: DraftShape, next_shape: DraftShape) -> Work:
    """Make work without prompts."""
    rows = [request.state_row for request in verifying]
    return Work(
        state_rows=rows,
        shape=shape,
        next_shape=next_shape,
        verifying=verifying,
        prompts=[],
        parts=[],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next step and the state updates before it. work: None if nothing can be launched now."""

    admitted: list[Request]
    grown: list[tuple[int, int, int]]  # (state row, block of the request, cache block)
    work: Work | None
