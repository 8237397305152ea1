"""A step as the host knows it: its work and sizes. Accepted counts stay on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from graphs.dispatch import Dispatch
from specdec.requests.row_start import GREEDY, SamplingFlags
from specdec.scheduling.work import PromptPart


class Proposal(NamedTuple):
    """How the draft proposes.

    is_drawn: with noise, for a sampled request. is_tree: a tree for each request, not a chain
    """

    is_drawn: bool
    is_tree: bool


class RowMasks(NamedTuple):
    """The tokens that grammars allow after X decided rows; all other rows may take any token."""

    row_X: np.ndarray  # int64
    bits_XW: np.ndarray  # int32 [X, ceil(V / 32)] a bit for each id, the lowest first


BEST_CHAINS = Proposal(is_drawn=False, is_tree=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How each pass runs, over a graph's sizes or the true ones. None: it does not run."""

    target: Dispatch
    draft_prefill: Dispatch | None = None
    draft_decode: Dispatch | None = None

    @property
    def extends_only(self) -> bool:
        """Whether the draft's prefill writes KV and proposes nothing."""
        return self.draft_prefill is not None and self.draft_decode is None

    @property
    def num_reqs(self) -> int:
        """Batch slots of the widest pass; 0 where graphs take any number of them."""
        return max(how.descriptor.num_reqs or 0 for how in self._all())

    @property
    def num_tokens(self) -> int:
        return max(how.descriptor.num_tokens for how in self._all())

    def _all(self) -> list[Dispatch]:
        passes = (self.target, self.draft_prefill, self.draft_decode)
        return [how for how in passes if how is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The step that is launched: a verify slot for each of `state_rows`, then slots of `parts`.

    shared_rows: verify slots have 1 to query_len rows, by their shares of these; 0: query_len each
    path_len: verify slots hold trees, whose paths have this many rows; None: chains
    proposes_tree: the draft proposes a tree for each request after the step, not a chain
    num_levels: of the draft, after the step; None: K, in engines where their number is fixed
    """

    state_rows: Sequence[int] = ()
    query_len: int = 1  # rows of a verify slot
    shared_rows: int = 0
    path_len: int | None = None
    proposes_tree: bool = False
    num_levels: int | None = None
    parts: Sequence[PromptPart] = ()
    max_seq_len: int  # a bound on positions + 1 over all rows
    passes: Passes
    flags: SamplingFlags = GREEDY  # of all its requests together
    is_pq: bool = False  # p/q accepts, not equality with the target's tokens
    masks: Callable[[], RowMasks] | None = None  # of the rows that grammars guide

    @property
    def num_verified(self) -> int:
        return len(self.state_rows)

    @property
    def num_verify_rows(self) -> int:
        return self.shared_rows or len(self.state_rows) * self.query_len

    @property
    def num_reqs(self) -> int:
        return len(self.state_rows) + len(self.parts)

    @property
    def num_tokens(self) -> int:
        return self.num_verify_rows + sum(part.length for part in self.parts)

    @property
    def num_decided(self) -> int:
        """Count the rows after which a token is chosen: all that verify, and each part's last."""
        return self.num_verify_rows + len(self.parts)

    @property
    def max_num_sampled(self) -> int:
        """Count the rows of a verify slot that give tokens and logprobs, the accepted first."""
        return self.query_len if self.path_len is None else self.path_len

    @property
    def of_paths(self) -> "Step":
        """Return the step as the draft's prefill sees it: trees are cut down to their paths."""
        return replace(self, query_len=self.max_num_sampled, path_len=None)

    @property
    def verifies_trees(self) -> bool:
        return self.path_len is not None

    @property
    def proposal(self) -> Proposal:
        return Proposal(self.flags.noise, self.proposes_tree)

    @property
    def runs_draft(self) -> bool:
        """Whether the draft model, if any, runs: with prompts, and where a request drafts."""
        return self.passes.draft_prefill is not None

    @property
    def proposes(self) -> bool:
        """Whether the draft proposes tokens: not where prompts go on and nothing else runs."""
        return self.passes.draft_decode is not None

    @property
    def num_proposing_reqs(self) -> int:
        """Count the slots with a first proposal: those of the levels after it, with padding."""
        how = self.passes.draft_decode
        return max(self.num_reqs, 0 if how is None else how.descriptor.num_reqs or 0)

    @property
    def num_padded_reqs(self) -> int:
        """Count the slots that `fill` writes: each pass reads the first ones, up to its size."""
        return max(self.num_reqs, self.passes.num_reqs)

    @property
    def num_padded_tokens(self) -> int:
        is_ragged = self.parts or self.shared_rows
        uniform = 0 if is_ragged else self.num_padded_reqs * self.query_len
        return max(self.num_tokens, self.passes.num_tokens, uniform)
