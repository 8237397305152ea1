"""Counts of speculation, in the field's definitions, for a request or for a run.

D rounds, T drafted and A accepted tokens (bonus and recovered tokens are not counted). A round
drafts the request's own K, or several nodes of each level, and levels are the positions; the token
that prefill samples is in no round. A rate over 0 is None.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from specdec.requests.draft_tree import depths

FIGURES = (
    *("acceptance", "num_rounds", "num_drafted_tokens", "num_accepted_tokens"),
    *("mean_acceptance_length", "draft_acceptance_rate", "num_accepted_per_position"),
    *("acceptance_rate_per_position", "conditional_acceptance_rates", "acceptance_histogram"),
)
SHOWN = (
    *("num_rounds", "num_drafted_tokens", "num_accepted_tokens", "mean_acceptance_length"),
    *("draft_acceptance_rate", "acceptance"),
)
REQUEST_FIGURES = (
    *("num_prompt_tokens", "num_generated_tokens", "num_cached_tokens", "num_preemptions"),
    *("time_to_first_token", "time_per_token", "tokens_per_second", "round_ms"),
)


PlainRound = tuple[tuple[int, ...], int, int, tuple[int, ...]]  # of a RoundRecord


class RoundRecord(NamedTuple):
    """One round of one request: its drafts, how many were accepted, and the target's next token.

    parents: of nodes that may be siblings, 0 for the root and i for the i-th; none of a chain
    """

    draft_tokens: tuple[int, ...]
    num_accepted: int
    sampled_token: int
    parents: tuple[int, ...] = ()

    @property
    def num_levels(self) -> int:
        """Count the drafts on the longest path: all of a chain."""
        return max(depths(self.parents)) if self.parents else len(self.draft_tokens)


@dataclass(slots=True, repr=False)
class SpeculationStats:
    """Rounds; every figure is derived from them."""

    acceptance: str = "exact"  # the rule that accepted them; "mixed" if merged over several rules
    # The fields of each record: Python's collector walks over objects again and again, but no more
    # over plain tuples of numbers once it has seen them.
    _rounds: list[PlainRound] = field(default_factory=list, init=False)

    def __repr__(self) -> str:
        """Show the figures, not the rounds that they are derived from."""
        return self._shown(SHOWN)

    def _shown(self, names: Sequence[str]) -> str:
        values = {name: getattr(self, name) for name in names}
        short = {n: float(f"{v:.4g}") if isinstance(v, float) else v for n, v in values.items()}
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in short.items())})"

    @property
    def rounds(self) -> list[RoundRecord]:
        """Return all rounds, in order: new records each time."""
        return self.rounds_after(0)

    def rounds_after(self, count: int) -> list[RoundRecord]:
        return [RoundRecord(*each) for each in self._rounds[count:]]

    def add_round(self, record: RoundRecord) -> None:
        """Count one round. ValueError if more was accepted than could be."""
        num_drafted, num_accepted = record.num_levels, record.num_accepted
        if not 0 <= num_accepted <= num_drafted:
            given = f"a round of num_drafted={num_drafted} with num_accepted={num_accepted}"
            raise ValueError(f"{given}: give 0 to num_drafted")
        self._rounds.append((*record,))

    @staticmethod
    def merged(parts: "Iterable[SpeculationStats]") -> "SpeculationStats":
        total = SpeculationStats()
        total._add_rounds(list(parts))
        return total

    def _add_rounds(self, parts: "Sequence[SpeculationStats]") -> None:
        for part in parts:
            self._rounds += part._rounds
        rules = {part.acceptance for part in parts}
        if rules:
            self.acceptance = rules.pop() if len(rules) == 1 else "mixed"

    @property
    def num_drafted(self) -> list[int]:
        return [len(draft_tokens) for draft_tokens, *_ in self._rounds]

    @property
    def num_accepted(self) -> list[int]:
        """Count accepted drafts of each round, before the last one is trimmed."""
        return [num_accepted for _, num_accepted, *_ in self._rounds]

    @property
    def num_levels(self) -> list[int]:
        return [record.num_levels for record in self.rounds]

    @property
    def num_rounds(self) -> int:
        return len(self._rounds)

    @property
    def num_drafted_tokens(self) -> int:
        return sum(self.num_drafted)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted)

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + A / D: tokens per round, the target's own included."""
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        drafted = self.num_drafted_tokens
        return self.num_accepted_tokens / drafted if drafted else None

    @property
    def num_accepted_per_position(self) -> list[int]:
        """Rounds that accepted at least i tokens, for i = 1..K."""
        counts, K = self.num_accepted, max(self.num_levels, default=0)
        return [sum(count >= i for count in counts) for i in range(1, K + 1)]

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Share of rounds that accepted at least i tokens; 1 + their sum is the mean length."""
        return [count / self.num_rounds for count in self.num_accepted_per_position]

    @property
    def conditional_acceptance_rates(self) -> list[float | None]:
        """Rate at i over the rate at i - 1: how often a draft is accepted after an accepted one."""
        counts = [self.num_rounds, *self.num_accepted_per_position]
        return [here / before if before else None for before, here in itertools.pairwise(counts)]

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """Rounds by the number of tokens they committed, 1..K + 1."""
        return dict(sorted(Counter(count + 1 for count in self.num_accepted).items()))

    def as_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in FIGURES}


@dataclass(slots=True, repr=False)
class RequestStats(SpeculationStats):
    """A request's rounds and times. Times are seconds of the host's monotonic clock."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0  # in the output, after trimming
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_preemptions: int = 0  # times it lost its blocks and computed its tokens again
    arrival_time: float = 0.0
    first_token_time: float | None = None
    last_token_time: float | None = None
    side_by_side: float | None = None  # decode_time of several samples, added up; None: of one

    def __repr__(self) -> str:
        return self._shown((*SHOWN, *REQUEST_FIGURES))

    def since(self, count: int) -> "RequestStats":
        """Return a copy without the first `count` rounds."""
        found = replace(self)
        found._rounds = self._rounds[count:]
        return found

    def add(self, later: "RequestStats") -> None:
        """Append the next rounds; counts and times become the later ones."""
        self._rounds += later._rounds
        for name in SO_FAR:
            setattr(self, name, getattr(later, name))

    @staticmethod
    def of_samples(parts: "Sequence[RequestStats]") -> "RequestStats":
        """Copy the statistics of a request's samples together, rounds sample after sample."""
        if not parts:
            return RequestStats()
        firsts = [each.first_token_time for each in parts if each.first_token_time is not None]
        lasts = [each.last_token_time for each in parts if each.last_token_time is not None]
        together = RequestStats(
            num_prompt_tokens=parts[0].num_prompt_tokens,
            arrival_time=parts[0].arrival_time,
            num_generated_tokens=sum(part.num_generated_tokens for part in parts),
            num_cached_tokens=parts[0].num_cached_tokens,
            num_preemptions=sum(part.num_preemptions for part in parts),
            first_token_time=min(firsts, default=None),
            last_token_time=max(lasts, default=None),
            side_by_side=sum(part.decode_time or 0.0 for part in parts),
        )
        together._add_rounds(parts)
        return together

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the token that prefill samples."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first to the last token."""
        if self.first_token_time is None or self.last_token_time is None:
            return None
        return self.last_token_time - self.first_token_time

    @property
    def time_per_token(self) -> float | None:
        """Seconds per token after the first."""
        if self.decode_time is None or self.num_generated_tokens < 2:
            return None
        return self.decode_time / (self.num_generated_tokens - 1)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second, after the first."""
        return 1 / self.time_per_token if self.time_per_token else None

    @property
    def round_ms(self) -> float | None:
        """Milliseconds per round of a sample, waiting for others and other requests included."""
        seconds = self.decode_time if self.side_by_side is None else self.side_by_side
        if not seconds or not self.num_rounds:
            return None
        return 1e3 * seconds / self.num_rounds

    def as_dict(self) -> dict[str, object]:
        own = {name: getattr(self, name) for name in REQUEST_FIGURES}
        return SpeculationStats.as_dict(self) | own


SO_FAR = tuple(each.name for each in fields(RequestStats) if each.init)  # all but the rounds
