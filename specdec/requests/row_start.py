"""What the device has to know of a request: its state row (rounds/state.py) at the start, in host
numbers, and the parts of sampling that it needs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingStart:
    """The sampling part of a state row, in ids. The default is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    prompt: Sequence[int] = ()  # needed with penalties and bad words

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStart:
    """A state row at its start.

    generated: after a preemption its tokens but the last, which the end of prefill counts.
    """

    blocks: Sequence[int]
    num_draft_tokens: int
    min_position: int = 0  # below it, stop_ids are never drawn
    stop_ids: Sequence[int] = ()
    sampling: SamplingStart = field(default_factory=SamplingStart)
    generated: Sequence[int] = ()


class SamplingFlags(NamedTuple):
    """The parts of sampling that the requests of a step need; others are skipped.

    A row does not depend on its neighbours: rows that do not use a part are left unchanged by it.
    """

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
        return reduce(SamplingFlags.__or__, set(parts), GREEDY)  # most are equal


GREEDY = SamplingFlags()
EVERYTHING = SamplingFlags._make([True] * 6 + [1])
