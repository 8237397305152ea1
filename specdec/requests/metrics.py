"""What an engine has done since its start: `LLM.get_metrics` and a server's /metrics read it here.

Names are vLLM's with the prefix "specdec:" where the meaning is the same; rows_verified,
levels_drafted, tree_rounds, round_tokens_*, steps, step_rows and compilations_after_start are ours.
Tokens and rounds count in the step that brings them, a prompt when it is computed; reasons,
preemptions and the prefix cache when a request ends, with all its samples.
"""

from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdec.requests.request import Request
from specdec.requests.stats import RoundRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Names a figure. labels: what it is about, such as {"finished_reason": "stop"}."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """Counts up and never falls."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """Tells what is true now."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector(Metric):
    """Counts by position, from 1."""

    values: list[int]


PREFIX = "specdec:"
COUNTERS = (
    *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("num_preemptions", "rows_verified"),
)


class Totals:
    """Adds up since the start; counting costs the same however long a request is."""

    def __init__(self) -> None:
        self._counts = Counts[str]()
        self._reasons = Counts[str]()
        # by drafted tokens, those on the longest path, and accepted ones
        self._rounds = Counts[tuple[int, int, int]]()

    def launched(self, num_verify_rows: int) -> None:
        """Count the rows of a step's requests that verify."""
        self._counts["rows_verified"] += num_verify_rows

    def prompt_ended(self, sample: Request) -> None:
        """Count a computed prompt, once for all samples of a request."""
        if sample.index == 0:
            self._counts["prompt_tokens"] += len(sample.prompt_token_ids)

    def verified(self, record: RoundRecord) -> None:
        self._rounds[len(record.draft_tokens), record.num_levels, record.num_accepted] += 1

    def generated(self, num_tokens: int) -> None:
        self._counts["generation_tokens"] += num_tokens

    def ended(self, samples: Sequence[Request]) -> None:
        """Count a request that has ended, with all its samples."""
        for sample in samples:
            stats = sample.stats
            self._counts["prefix_cache_queries"] += stats.num_prompt_tokens
            self._counts["prefix_cache_hits"] += stats.num_cached_tokens
            self._counts["num_preemptions"] += stats.num_preemptions
            if sample.finish is not None:
                self._reasons[sample.finish.reason] += 1

    def metrics(
        self,
        gauges: Mapping[str, float],
        counts: Mapping[str, int],
        steps: Mapping[str, Mapping[str, tuple[int, int]]],
        num_compilations: int,
    ) -> list[Metric]:
        """List these sums and what else the engine counts, by name.

        steps: by family of graphs and mode, batches and their rows without padding
        num_compilations: kernels that requests waited for
        """
        rounds = list(dict(self._rounds).items())  # a copy: another thread may be counting
        counts = {
            **{name: self._counts[name] for name in COUNTERS},
            **counts,
            "spec_decode_num_drafts": sum(n for (drafted, _, _), n in rounds if drafted),
            "spec_decode_num_draft_tokens": sum(n * drafted for (drafted, _, _), n in rounds),
            "spec_decode_num_accepted_tokens": sum(n * accepted for (*_, accepted), n in rounds),
        }
        num_positions = max((levels for (_, levels, _), _ in rounds), default=0)
        accepted_per_position = [
            sum(n for (*_, accepted), n in rounds if accepted >= position)
            for position in range(1, num_positions + 1)
        ]
        modes = [
            ({"family": a, "mode": b}, n) for a, found in steps.items() for b, n in found.items()
        ]
        reasons = sorted(dict(self._reasons).items())
        vector = f"{PREFIX}spec_decode_num_accepted_tokens_per_pos"
        return [
            *(Gauge(name=PREFIX + name, value=value) for name, value in gauges.items()),
            *(_counter(name, value) for name, value in counts.items()),
            *(_counter("request_success", n, finished_reason=reason) for reason, n in reasons),
            Vector(name=vector, values=accepted_per_position),
            *(_counter("steps", num_batches, **labels) for labels, (num_batches, _) in modes),
            *(_counter("step_rows", num_rows, **labels) for labels, (_, num_rows) in modes),
            _counter("compilations_after_start", num_compilations),
        ]


def _counter(name: str, value: int, **labels: str) -> Counter:
    return Counter(name=PREFIX + name, labels=labels, value=value)
