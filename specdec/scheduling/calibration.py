"""How often a draft of probability p holds: a logistic in logit(p).

Each level of the chain has two numbers, (intercept, slope), for greedy requests and two for sampled
ones: conditional = sigmoid(intercept + slope * logit(p)), the chance that the draft holds given
that those before it do. They are fitted to recent verified drafts of each level and kind whose
parents held. Drafts that were not verified show nothing and are not used; rows go to drafts by p,
so the relation between p and y stays the same among the verified ones.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]
Booleans = NDArray[np.bool_]

CLIP = 1e-4  # probabilities of the draft closer than this to 0 or 1 count as this close
LEAST_SLOPE = 0.05  # above 0, so that the order within a level is kept
PRIOR = (0.25, 1.0)  # precisions of intercept and slope around (0, 1): a few observations
NUM_ITERATIONS = 20


class Calibration:
    """The fits of all levels, on windows of recent observations.

    coefficients: [2, K, 2] float32: (intercept, slope) for greedy and sampled, by level; a new
        array after each change
    num_fits: how often it changed
    """

    def __init__(self, num_levels: int) -> None:
        self._num_levels = num_levels
        self.num_fits = 0
        self.forget()

    def forget(self) -> None:
        """Start again: the draft's probabilities are taken as they are."""
        self.coefficients = np.zeros((2, self._num_levels, 2), np.float32)
        self.coefficients[..., 1] = 1
        self.num_fits += 1
        none = (np.zeros(0), np.zeros(0, bool))  # logits, whether they held
        self._windows = [[none] * self._num_levels for _ in range(2)]
        self._is_new = np.zeros((2, self._num_levels), bool)

    def add(
        self,
        confidences: Floats,
        num_verified: Integers,
        num_accepted: Integers,
        is_sampled: Booleans,
        window: int,
    ) -> None:
        """Observe rounds of requests; of each level and kind the last `window` drafts are kept.

        confidences: [S, K], of which the first num_verified[s] count
        num_verified, num_accepted, is_sampled: [S]
        """
        logits = logit(confidences)
        for level in range(min(self._num_levels, int(num_verified.max(initial=0)))):
            is_observed = (num_accepted >= level) & (num_verified > level)
            for kind in range(2):
                of_kind = is_observed & (is_sampled == bool(kind))
                if of_kind.any():
                    logits_before, held_before = self._windows[kind][level]
                    new_logits, new_held = logits[of_kind, level], num_accepted[of_kind] > level
                    self._windows[kind][level] = (
                        np.concatenate([logits_before, new_logits])[-window:],
                        np.concatenate([held_before, new_held])[-window:],
                    )
                    self._is_new[kind, level] = True

    def fit(self) -> None:
        if not self._is_new.any():
            return
        coefficients = self.coefficients.copy()
        for kind, level in np.argwhere(self._is_new):
            logits, held = self._windows[kind][level]
            coefficients[kind, level] = fit_logistic(logits, held)
        self.coefficients = coefficients
        self.num_fits += 1
        self._is_new[:] = False

    def conditionals(self, confidences: Floats, is_sampled: Booleans) -> Floats:
        """[S, K] chance of each draft to hold given that those before it do."""
        of_request = self.coefficients[is_sampled.astype(np.intp)]  # [S, K, 2]
        return _sigmoid(of_request[..., 0] + of_request[..., 1] * logit(confidences))


def fit_logistic(logits: Floats, held: Booleans) -> tuple[float, float]:
    """(intercept, slope) of the most probable logistic, near (0, 1) where little is known.

    The prior is normal around (0, 1), so the loss is strictly convex whatever was observed: Newton
    steps, none longer than 1 so that a flat start cannot throw them far. The slope stays at least
    LEAST_SLOPE.
    """
    intercept, slope = 0.0, 1.0
    for _ in range(NUM_ITERATIONS):
        probs = _sigmoid(intercept + slope * logits)
        errors, weights = probs - held, probs * (1 - probs)
        down_a = errors.sum() + PRIOR[0] * intercept
        down_b = errors @ logits + PRIOR[1] * (slope - 1)
        weighted = weights * logits
        h_aa, h_ab, h_bb = (
            weights.sum() + PRIOR[0],
            weighted.sum(),
            weighted @ logits + PRIOR[1],
        )
        if slope <= LEAST_SLOPE and down_b > 0:
            step_a, step_b = down_a / h_aa, 0.0  # the slope would fall further: hold it
        else:
            det = h_aa * h_bb - h_ab * h_ab  # > 0: both precisions are
            step_a = (h_bb * down_a - h_ab * down_b) / det
            step_b = (h_aa * down_b - h_ab * down_a) / det
        length = max(abs(step_a), abs(step_b))
        shrink = min(1.0, 1.0 / length) if length else 1.0
        intercept -= float(shrink * step_a)
        slope = max(LEAST_SLOPE, slope - float(shrink * step_b))
        if length < 1e-4:
            break
    return intercept, slope


def logit(probs: Floats) -> Floats:
    """log(p / (1 - p)) of clipped probabilities; as float64."""
    clipped = np.clip(probs, CLIP, 1 - CLIP, dtype=np.float64)
    return np.asarray(np.log(clipped / (1 - clipped)))


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))
