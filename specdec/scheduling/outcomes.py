"""What verified rounds show: for each request, how likely each level was to hold, and what held.

Rounds are described many at a time, once something is learned from them: each alone would take the
host as long as a small model's round takes the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.scheduling.gains import Booleans, Floats, Integers
from specdec.sizes import DraftShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """One verified round, by batch slot; X nodes are those of the shape, of chains the most levels.

    probs: [B, X] path probabilities of live nodes; 0: not live
    num_verified: [B] drafts that had a row
    num_accepted: [B] drafts that held
    num_allowed: [B] the most levels that the request may have; 0 where it must not draft
    is_sampled: [B] temperature > 0
    threshold: below which the drafts stopped
    parents: of trees, the row of each node's parent
    num_on_chains: of trees, [B] the drafts that held and that chains would have had too
    """

    shape: DraftShape
    probs: Floats
    num_verified: Integers
    num_accepted: Integers
    num_allowed: Integers
    is_sampled: Booleans
    threshold: float = 0.0
    parents: Sequence[Sequence[int]] = ()
    num_on_chains: Integers | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What rounds of one kind of drafts showed of S requests that might draft; L levels.

    held: [S, L] summed path probabilities of each level's live nodes
    best: [S, L] the most probable path of each level
    num_run: [S] levels that were drafted before all drafts of the round stopped
    num_shown: [S] levels of which was seen whether another draft holds
    num_accepted, num_allowed, is_sampled: [S] as of an outcome
    """

    held: Floats
    best: Floats
    num_run: Integers
    num_shown: Integers
    num_accepted: Integers
    num_allowed: Integers
    is_sampled: Booleans


def shown_by_chains(rounds: Sequence[RoundOutcome]) -> Shown:
    """Describe rounds of chains of any lengths; their probabilities are as wide as the longest."""
    probs = _probs(rounds)
    levels = np.repeat([each.shape.levels for each in rounds], _num_requests(rounds))
    held = np.where(np.arange(probs.shape[1]) < levels[:, None], probs, 0.0)
    num_run = np.maximum.reduceat((held > 0).sum(axis=1), _starts(rounds))
    shown = _joined(rounds, "num_verified"), _joined(rounds, "num_accepted")
    return _shown(rounds, held, held, num_run, *shown)


def shown_by_trees(rounds: Sequence[RoundOutcome], num_levels: int) -> tuple[Shown, Shown]:
    """Describe rounds of trees of one shape, and what chains of num_levels would have shown.

    The chain of a tree goes from each node to its first child, whose probability is the largest.
    """
    probs, allowed = _probs(rounds), _joined(rounds, "num_allowed")
    depths, first_rows = _nodes(rounds, probs.shape[1], num_levels)
    levels = np.arange(1, rounds[0].shape.levels + 1)
    at_level = np.where(depths[:, None] == levels[:, None], probs[:, None], 0.0)  # [S, L, X]
    held, best = at_level.sum(axis=2), at_level.max(axis=2)
    # of a level without nodes no path is more probable than the least probable node
    least = np.where(depths > 0, probs, np.inf).min(axis=1)
    least[np.isinf(least)] = 0.0
    best = np.where(best > 0, best, least[:, None])
    num_run = _last_levels(rounds, best, allowed)
    num_shown = np.minimum(np.repeat(num_run, _num_requests(rounds)), allowed)
    accepted = _joined(rounds, "num_accepted")
    own = _shown(rounds, held, best, num_run, num_shown, accepted)
    with_root = np.column_stack([np.zeros(len(probs)), probs])
    paths = np.take_along_axis(with_root, first_rows, axis=1)
    paths = np.where(np.arange(num_levels) < np.minimum(allowed, levels[-1])[:, None], paths, 0.0)
    shown = (paths > 0).sum(axis=1), _joined(rounds, "num_on_chains")
    return own, _shown(rounds, paths, paths, num_run, *shown)


def _shown(
    rounds: Sequence[RoundOutcome],
    held: Floats,
    best: Floats,
    num_run: Integers,
    num_shown: Integers,
    num_accepted: Integers,
) -> Shown:
    """Leave out requests that must not draft, and levels that a request may not have."""
    allowed = _joined(rounds, "num_allowed")
    drafts = allowed > 0
    is_allowed = (np.arange(held.shape[1]) < allowed[:, None])[drafts]
    return Shown(
        held=held[drafts] * is_allowed,
        best=best[drafts] * is_allowed,
        num_run=np.repeat(num_run, _num_requests(rounds))[drafts],
        num_shown=num_shown[drafts],
        num_accepted=num_accepted[drafts],
        num_allowed=allowed[drafts],
        is_sampled=_joined(rounds, "is_sampled")[drafts],
    )


def _nodes(
    rounds: Sequence[RoundOutcome], num_nodes: int, num_levels: int
) -> tuple[Integers, Integers]:
    """Find the level of each node [S, X], 0: none, and the rows of chains [S, num_levels].

    Row 0 is the root, and stands for levels that a chain does not have.
    """
    parents = np.full((sum(_num_requests(rounds)), num_nodes), -1)
    for row, known in zip(parents, (each for one in rounds for each in one.parents), strict=True):
        row[: len(known)] = known
    entries = np.arange(len(parents))
    depths = np.zeros((len(parents), 1 + num_nodes), np.intp)
    first_rows = np.zeros((len(parents), 1 + max(num_nodes, num_levels)), np.intp)
    last, length = np.zeros(len(parents), np.intp), np.zeros(len(parents), np.intp)
    for x, parent in enumerate(parents.T):
        depths[:, 1 + x] = np.where(parent < 0, 0, depths[entries, parent] + 1)
        is_next = parent == last
        first_rows[entries, length] = np.where(is_next, 1 + x, 0)
        length += is_next
        last[is_next] = 1 + x
    return depths[:, 1:], first_rows[:, :num_levels]


def _last_levels(rounds: Sequence[RoundOutcome], best: Floats, num_allowed: Integers) -> Integers:
    """Find the last level that the trees of each round drafted together.

    They went on where the most probable paths of the level before were probable enough on average.
    """
    votes = num_allowed[:, None] > np.arange(1, best.shape[1])
    num_voting = np.add.reduceat(votes, _starts(rounds), dtype=np.intp)
    thresholds = np.array([[each.threshold] for each in rounds])
    goes_on = np.add.reduceat(best[:, :-1] * votes, _starts(rounds)) >= thresholds * num_voting
    return np.asarray(1 + (goes_on & (num_voting > 0)).cumprod(axis=1).sum(axis=1))


def _probs(rounds: Sequence[RoundOutcome]) -> Floats:
    return np.asarray(np.clip(np.nan_to_num(_joined(rounds, "probs")), 0.0, 1.0))


def _joined(rounds: Sequence[RoundOutcome], name: str) -> NDArray[Any]:
    return np.concatenate([getattr(each, name) for each in rounds])


def _num_requests(rounds: Sequence[RoundOutcome]) -> list[int]:
    return [len(each.probs) for each in rounds]


def _starts(rounds: Sequence[RoundOutcome]) -> list[int]:
    return [0, *np.cumsum(_num_requests(rounds))[:-1]]
