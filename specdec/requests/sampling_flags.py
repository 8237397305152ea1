"""What the requests of a step ask for together. The host knows it, so no step computes what nobody in it asked for.

A row is never changed by what its neighbours need: every part leaves rows that did not ask for it as they were.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    noise: bool = False  # a temperature above 0
    floor: bool = False  # top_p, top_k or min_p
    bias: bool = False  # logit_bias or allowed_token_ids
    bad_words: bool = False
    penalties: bool = False
    logprobs: int = -1  # alternatives beside the token, -1 = no logprobs

    def __or__(self, other: "SamplingFlags") -> "SamplingFlags":
        return SamplingFlags(
            noise=self.noise or other.noise,
            floor=self.floor or other.floor,
            bias=self.bias or other.bias,
            bad_words=self.bad_words or other.bad_words,
            penalties=self.penalties or other.penalties,
            logprobs=max(self.logprobs, other.logprobs),
        )

    @property
    def logits(self) -> bool:
        """Whether the step writes its logits out; else the best token is chosen as they are computed."""
        return self != GREEDY

    @staticmethod
    def of_all(parts: "Iterable[SamplingFlags]") -> "SamplingFlags":
        """What any of them needs."""
        return reduce(SamplingFlags.__or__, parts, GREEDY)


GREEDY = SamplingFlags()
EVERYTHING = SamplingFlags(
    noise=True, floor=True, bias=True, bad_words=True, penalties=True, logprobs=1
)
