"""Drafts that hold by chance, and what the draft says of itself."""

from dataclasses import dataclass

import numpy as np

K = 8


def logit(p):
    return np.log(p / (1 - p))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@dataclass(frozen=True)
class Draft:
    """Mean true conditionals by level, spread between requests and between drafts (logits).

    error: the draft's own logit is the true one plus this
    """

    means: tuple[float, ...] = (0.62, 0.57, 0.53, 0.5, 0.48, 0.46, 0.45, 0.44)
    between_requests: float = 0.7
    between_drafts: float = 1.5
    error: float = 0.0

    def draw(self, rng, easy, level):
        """Draw the true conditionals of best tokens, and what the draft says of them."""
        truth = 1.5 * logit(self.means[level]) + easy * self.between_requests
        truth = truth + rng.normal(size=np.shape(easy)) * self.between_drafts
        return sigmoid(truth), sigmoid(truth + self.error)


GOOD = Draft()
EASY = Draft(means=(0.75, 0.74, 0.73, 0.72, 0.71, 0.7, 0.7, 0.7))
TIMID = Draft(error=-1.33)  # says 0.15 where 0.4 is true
RANDOM = Draft(means=(1e-4,) * K, error=2.0)
BOASTFUL = Draft(means=(1e-4,) * K, error=14.5)  # says about 0.65, and nothing holds
CERTAIN = Draft(means=(1e-4,) * K, error=24.0)  # says 1, and nothing holds
