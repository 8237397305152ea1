"""The values of a request's state row (stepping/state.py) at its start, in host numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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
        """Whether counts of tokens matter."""
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
