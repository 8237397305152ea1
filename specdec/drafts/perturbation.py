"""The noise that a level's drafts are drawn with, and the floors below which no token is drawn.

Under "exact" it is the target's own, so that draft and target agree; p/q draws its drafts from a
noise of their own, and the state keeps the scores that they were drawn from.
"""

import torch
from torch import Tensor

from specdec.kernels.best_children import Perturbation
from specdec.kernels.gumbel import DRAFT, TARGET
from specdec.kernels.support_floor import support_floor
from specdec.rounds.level import DraftLevel
from specdec.sampler.row_parameters import TextPositions, row_parameters
from specdec.sampler.sampler import scaled_in_support


def perturbation(to: DraftLevel, logits_XW: Tensor, rule: str) -> Perturbation:
    """Find the floors of the level's rows and the keys of their noise; p/q keeps their scores.

    logits: of the rows that get children. rule: of acceptance
    """
    P = to.rows_per_req
    state = to.state
    row_X = to.buffers.sample_mapping[: len(logits_XW) // P]
    if P > 1:
        row_X = row_X.repeat_interleave(P)
    is_exact = rule == "exact"
    places, offset = None, 1 + (to.level or 0)  # after a request's computed tokens
    if to.level is None:  # after the level's own row
        places, offset = TextPositions(to.buffers.draft_positions[: len(row_X)], row_X), 2
    stream = TARGET if is_exact else DRAFT
    limits, keys = row_parameters(state, row_X, places, offset, stream, not is_exact)
    floor_X = support_floor(logits_XW, limits, to.cut)
    if not is_exact:
        assert to.level is not None, "p/q has a fixed number of levels"
        scores_XW = scaled_in_support(logits_XW, limits.temperatures, floor_X)
        if to.cut is not None:  # which target ids these are knows no rank's borders
            scores_XW = to.cut.joined(scores_XW, 1)
        state.draft_scores[row_X, to.level] = scores_XW
    return Perturbation(floor_X, keys._replace(token_ids=to.d2t_W))


def perturbation_of_block(to: DraftLevel, logits_XW: Tensor, K: int) -> Perturbation:
    """Find the same under "exact" for the rows of K levels at once, the first level's first."""
    state = to.state
    row_B = to.buffers.sample_mapping[: len(logits_XW) // K]
    level_K1 = torch.arange(K, device=row_B.device)[:, None]
    places = TextPositions((state.num_computed_tokens[row_B] + level_K1).flatten(), row_B.repeat(K))
    limits, keys = row_parameters(state, places.starts, places, 1, TARGET, False)
    floor_X = support_floor(logits_XW, limits, to.cut)
    return Perturbation(floor_X, keys._replace(token_ids=to.d2t_W))
