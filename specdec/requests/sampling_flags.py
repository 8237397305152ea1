"""The parts of sampling that the requests of a step need; the host knows, so others are skipped.

A row does not depend on its neighbours: rows that do not use a part are left unchanged by it.
"""

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple


class SamplingFlags(NamedTuple):
    noise: bool = False  # a temperature above 0
    floor: bool = False  # top_p, top_k or min_p
    bias: bool = False  # logit_bias or allowed_token_ids
    bad_words: bool = False
    penalties: bool = False
    guided: bool = False  # a grammar, whose masks come with the step
    logprobs: int = -1  # alternatives beside the token, -1 = no logprobs

    def __or__(self, other: "SamplingFlags") -> "SamplingFlags":
        return SamplingFlags._make(map(max, self, other))

    @property
    def logits(self) -> bool:
        """Whether the step writes logits to memory; else the best token is chosen on the fly."""
        return self != GREEDY

    @staticmethod
    def of_all(parts: "Iterable[SamplingFlags]") -> "SamplingFlags":
        """Combine what the parts need."""
        return reduce(SamplingFlags.__or__, set(parts), GREEDY)  # most are equal


GREEDY = SamplingFlags()
EVERYTHING = SamplingFlags(
    noise=True,
    floor=True,
    bias=True,
    bad_words=True,
    penalties=True,
    guided=True,
    logprobs=1,
)
