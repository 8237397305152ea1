"""A step that is launched: a round, and how each of its passes runs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from graphs.dispatch import Dispatch
from specdec.requests.params import GREEDY, SamplingFlags
from specdec.rounds.short import SHORT
from specdec.scheduling.work import Round
from specdec.sizes import chain


class Proposal(NamedTuple):
    """How the draft proposes.

    is_drawn: with noise, for a sampled request. is_wide: several children of a node
    block: how many tokens of a chain in one pass; 0: level by level, or as many as a tree has
    """

    is_drawn: bool
    is_wide: bool
    block: int = 0


class RowMasks(NamedTuple):
    """The tokens that grammars allow after X decided rows; all other rows may take any token."""

    row_X: np.ndarray  # int64
    bits_XW: np.ndarray  # int32 [X, ceil(V / 32)] a bit for each id, the lowest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How each pass runs, over a graph's sizes or the true ones. None: it does not run.

    choice: of the target's tokens after all rows of its graph; None: kernel by kernel, after the
        rows that decide alone
    extends_only: the draft's prefill writes KV and proposes nothing
    """

    target: Dispatch
    draft_prefill: Dispatch | None = None
    draft_decode: Dispatch | None = None
    choice: Dispatch | None = None
    extends_only: bool = False

    @property
    def num_reqs(self) -> int:
        """Batch slots of the widest pass; 0 where graphs take any number of them."""
        found = [how.descriptor for how in self._all()]
        return max(0 if each.kind == SHORT else each.num_reqs or 0 for each in found)

    @property
    def num_tokens(self) -> int:
        return max(how.descriptor.num_tokens for how in self._all())

    def _all(self) -> list[Dispatch]:
        passes = (self.target, self.draft_prefill, self.draft_decode)
        return [how for how in passes if how is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Round):
    """A round that is launched.

    max_seq_len: a bound on positions + 1 over all rows
    flags: of all its requests together
    is_pq: p/q accepts, not equality with the target's tokens
    masks: computes those of the rows that grammars guide
    """

    max_seq_len: int
    passes: Passes
    flags: SamplingFlags = GREEDY
    is_pq: bool = False
    masks: Callable[[], RowMasks] | None = None

    @property
    def of_paths(self) -> "Step":
        """Return the step as the draft's prefill sees it: each slot has the rows of a path."""
        return replace(self, shape=chain(self.shape.path_len - 1))

    @property
    def proposal(self) -> Proposal:
        return Proposal(self.flags.noise, self.next_shape.is_wide)

    @property
    def runs_draft(self) -> bool:
        """Whether the draft runs: to propose, or to extend its KV for rounds that will."""
        return self.passes.draft_prefill is not None

    @property
    def num_proposing_reqs(self) -> int:
        """Count the slots whose first level is written: as many as the levels after it read."""
        how = self.passes.draft_decode
        return max(self.num_reqs, 0 if how is None else how.descriptor.num_reqs or 0)

    @property
    def num_padded_reqs(self) -> int:
        """Count the slots that `fill` writes: each pass reads the first ones, up to its size."""
        return max(self.num_reqs, self.passes.num_reqs)

    @property
    def num_padded_verified(self) -> int:
        """Count the slots of these that verify: where prompts follow, none of them is padding."""
        return self.num_verified if self.parts else self.num_padded_reqs

    @property
    def num_padded_tokens(self) -> int:
        is_ragged = self.parts or self.shared_rows
        uniform = 0 if is_ragged else self.num_padded_reqs * self.shape.rows
        return max(self.num_tokens, self.passes.num_tokens, uniform)
