"""What the scheduler hands to the engine: a step's work, and the state updates it depends on."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.requests.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """Consecutive prompt tokens of one request, at positions start..start + length - 1."""

    state_row: int
    # the whole prompt; after a preemption also the tokens sampled so far. Of an array, which rows
    # are copied from, they need not be read one by one
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

    query_len: rows of each that verifies, 1 where none of them drafts, else all drafts and one
    path_len: of a tree's rows, those that its tokens come from; None: a chain's, which is all
    proposes_tree: what the draft proposes after this step is a tree for each, not a chain
    shared_rows: where not 0, each has 1 to query_len rows instead, its share of these
    num_live: levels of the drafts that the step before has left; 0 where these are dropped trees
    num_levels: that the draft runs after this step; None: all K, or none where no request drafts
    """

    verifying: list[Request]
    query_len: int
    prompts: list[Request]
    parts: list[PromptPart]
    shared_rows: int = 0
    num_live: int = 0
    num_levels: int | None = None
    path_len: int | None = None
    proposes_tree: bool = False

    @property
    def requests(self) -> list[Request]:
        return [*self.verifying, *self.prompts]

    @property
    def most_drafts(self) -> int:
        """Bound the drafts that a request may have accepted: at most one for each level.

        Where the number of levels varies, num_live counts them.
        """
        if self.shared_rows:
            return self.num_live
        most = self.max_num_sampled - 1
        return min(most, self.num_live) if self.num_live else most

    @property
    def num_verify_rows(self) -> int:
        return self.shared_rows or len(self.verifying) * self.query_len

    @property
    def verifies_trees(self) -> bool:
        return self.path_len is not None

    @property
    def max_num_sampled(self) -> int:
        """Count the rows of a verify slot that its tokens can come from."""
        return self.query_len if self.path_len is None else self.path_len

    @property
    def token_bounds(self) -> list[tuple[int, int]]:
        """The fewest and the most tokens that the step can bring to each request."""
        most_drafts = self.most_drafts
        rounds = [(1, 1 + min(each.num_speculative_tokens, most_drafts)) for each in self.verifying]
        return [*rounds, *((int(part.samples),) * 2 for part in self.parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next step and the state updates before it. work: None if nothing can be launched now."""

    admitted: list[Request]
    grown: list[tuple[int, int, int]]  # (state row, block of the request, cache block)
    work: Work | None
