"""One level of a draft: where its nodes go, the rows of the next, and whether there is a next one.

The rows of a level are the tokens that get children in it: one per request in the first level, k in
every further one of width k. Its nodes are these children, k for each row. Width 1 is a chain. The
rows of level j (0, 1, ...) have position num_computed - 1 + j: those of level 0 are seeds, the last
committed pairs. The rows after them embed tokens at the next position; beyond the context they are
padding (position 0, slot -1).

Drafts may stop by confidence: a level is then drafted only while the one before it is likely to
hold. After each level every slot that drafted it, and whose request may have another one, votes
with the probability of its best path. If their mean is at least the threshold, all of them draft
the next level; else all drafts end: buffers.num_going is 0, and the heavy kernels of the remaining
levels return at once (kernels/needed.py). So the drafts of a request depend on the others in its
batch; its text does not. A slot that does not draft a level computes something for it and writes
nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import jit, tl
from specdec.kernels.cut_ids import CutIds
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.state import RequestState
from specdec.sizes import DraftShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLevel:
    """Say what the level is of, and what follows it.

    level: None: the level after those that buffers.draft_levels counts, of width 1
    shape: of the whole draft, at most what its buffers have room for
    d2t_W: target ids of the draft's, None: the draft has the target's ids
    calibration: [2, K] factor of the odds by level, of greedy and of sampled requests, for the
        probabilities of width 1; None: it has none
    confidence_B: [B] float32, a second estimate that a node of width 1 holds if all above it do;
        None: there is none
    temperature_B: [B] float32, where scores of width 1 are logits + temperature * noise already
    threshold: [1] of the mean vote, on the device. Below 0 all slots go on, padding too, which the
        measurement of a level's cost at the start relies on. None: no slot stops
    cut: the draft ids that this rank's head has, where others have the rest
    """

    buffers: StepBuffers
    state: RequestState
    level: int | None
    shape: DraftShape
    d2t_W: Tensor | None
    max_model_len: int
    calibration: Tensor | None = None
    confidence_B: Tensor | None = None
    temperature_B: Tensor | None = None
    threshold: Tensor | None = None
    cut: CutIds | None = None

    @property
    def width(self) -> int:
        return self.shape.width

    @property
    def rows_per_req(self) -> int:
        """Count the rows of a request that get children."""
        return 1 if self.level == 0 else self.width

    @property
    def is_last(self) -> bool:
        return self.level is not None and self.level + 1 == self.shape.levels

    @property
    def first_place(self) -> int:
        """Find the first of the level's nodes among the nodes of all levels."""
        assert self.level is not None, "a level of its own, of width 1"
        return self.width + self.width**2 * (self.level - 1) if self.level > 0 else 0


@jit
def count_drafting(pointers, level, idx, row):
    """Count the slots that draft this level, which is not the first; 0 if this slot does not.

    pointers: num_going [1], votes [1], num_draft_tokens [R + 1], threshold [1] float32
    """
    num_going_ptr, _, num_drafts_ptr, threshold_ptr = pointers
    has_room = (idx >= 0) & (level < tl.load(num_drafts_ptr + row))
    num_going = tl.where(has_room, tl.load(num_going_ptr), 0)
    return tl.where(tl.load(threshold_ptr) < 0.0, tl.num_programs(0), num_going)


@jit
def decide(pointers, num_voters, prob, level, idx, row):
    """Vote after `level`, whose best path has this probability. The last of the voters decides.

    A vote is an integer, so that the order of votes does not matter: 13 bits that count votes, 13
    that count slots with room for another level, and the margin over the threshold in units of
    2**-24. The sum of 4,096 slots fits.
    """
    COUNT: tl.constexpr = (1 << 13) - 1
    num_going_ptr, votes_ptr, num_drafts_ptr, threshold_ptr = pointers
    threshold = tl.load(threshold_ptr)
    has_room = ((idx >= 0) & (level + 1 < tl.load(num_drafts_ptr + row))) | (threshold < 0.0)
    known = tl.where(prob > 0.0, tl.minimum(prob, 1.0), 0.0)  # 0 for NaN
    margin = tl.floor((known - threshold) * (1 << 24)).to(tl.int64)
    vote = tl.where(has_room, (margin << 26) + (1 << 13), 0) + 1
    tl.debug_barrier()  # every warp has read num_voters, where the last vote writes
    votes = tl.atomic_add(votes_ptr, vote, sem="acq_rel") + vote
    is_last = (votes & COUNT) == num_voters
    num_going = tl.where(votes >= 0, (votes >> 13) & COUNT, 0)
    tl.store(num_going_ptr, num_going, mask=is_last)
    tl.store(votes_ptr, tl.zeros((), tl.int64), mask=is_last)


def drafting_ref(to: DraftLevel, level_B: Tensor) -> Tensor:
    """Find the slots [B] that draft their level."""
    if to.threshold is None or to.level == 0:
        return torch.ones_like(level_B, dtype=torch.bool)
    row_B = to.buffers.sample_mapping[: len(level_B)]
    has_room_B = (row_B >= 0) & (level_B < to.state.num_draft_tokens[row_B])
    return (has_room_B & (to.buffers.num_going > 0)) | (to.threshold < 0)


def decide_ref(to: DraftLevel, prob_B: Tensor, level_B: Tensor, drafts_B: Tensor) -> None:
    """Decide for all slots. drafts_B: those that drafted the level, whose index is in level_B."""
    if to.threshold is None:
        return
    row_B = to.buffers.sample_mapping[: len(prob_B)]
    has_room_B = (row_B >= 0) & (level_B + 1 < to.state.num_draft_tokens[row_B])
    votes_B = drafts_B & (has_room_B | (to.threshold < 0))
    known_B = torch.where(prob_B > 0, prob_B.clamp(max=1), 0.0)  # 0 for NaN
    margin_B = ((known_B - to.threshold) * (1 << 24)).floor().long()
    sum_of_all = torch.where(votes_B, margin_B, 0).sum()
    to.buffers.num_going.copy_(torch.where(sum_of_all >= 0, votes_B.sum(), 0))


def replace(rows: Tensor, values: Tensor, drafts_B: Tensor) -> None:
    """Replace the rows of slots that draft the level; the others keep what they have."""
    drafts = drafts_B.repeat_interleave(len(rows) // len(drafts_B))
    drafts = drafts.view(-1, *[1] * (rows.ndim - 1))
    rows.copy_(torch.where(drafts, values.reshape(rows.shape), rows))
