"""What an engine has done since its start, as `LLM.get_metrics` reports it.

Names are vLLM's with the prefix "specdec:" where the meaning is the same. A request counts when it
ends, with all its samples.
"""

from collections import Counter as Counts
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.requests.request import Request
from specdec.requests.stats import RequestStats, SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure. labels: what it is about, such as {"finished_reason": "stop"}."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """Only grows."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """What is true now."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector(Metric):
    """Counters by position, from 1."""

    values: list[int]


class Totals:
    """Sums over the requests that have ended."""

    def __init__(self) -> None:
        self._counts = Counts[str]()
        self._reasons = Counts[str]()
        self._accepted: list[int] = []  # per position

    def count(self, samples: Sequence[Request]) -> None:
        """Add a request that has ended."""
        stats = RequestStats.of_samples([sample.stats for sample in samples])
        self._counts.update(
            prompt_tokens=stats.num_prompt_tokens,
            generation_tokens=stats.num_generated_tokens,
            prefix_cache_queries=stats.num_prompt_tokens * len(samples),
            prefix_cache_hits=stats.num_cached_tokens,
            num_preemptions=stats.num_preemptions,
            spec_decode_num_drafts=sum(count > 0 for count in stats.num_drafted),
            spec_decode_num_draft_tokens=stats.num_drafted_tokens,
            spec_decode_num_accepted_tokens=stats.num_accepted_tokens,
        )
        self._reasons.update(each.finish.reason for each in samples if each.finish is not None)
        self._add_positions(stats)

    def _add_positions(self, stats: SpeculationStats) -> None:
        counts = stats.num_accepted_per_position
        self._accepted += [0] * (len(counts) - len(self._accepted))
        for i, count in enumerate(counts):
            self._accepted[i] += count

    def metrics(self, num_running: int, num_waiting: int, cache_usage: float) -> list[Metric]:
        """All of them. cache_usage: the share of the cache's blocks that requests hold."""
        gauges = {
            "num_requests_running": num_running,
            "num_requests_waiting": num_waiting,
            "kv_cache_usage_perc": cache_usage,
        }
        found: list[Metric] = [_gauge(name, value) for name, value in gauges.items()]
        found += [_counter(name, self._counts[name]) for name in COUNTERS]
        found += [
            Counter(name="specdec:request_success", labels={"finished_reason": reason}, value=count)
            for reason, count in sorted(self._reasons.items())
        ]
        name = "specdec:spec_decode_num_accepted_tokens_per_pos"
        return [*found, Vector(name=name, values=list(self._accepted))]


COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)


def _gauge(name: str, value: float) -> Gauge:
    return Gauge(name=f"specdec:{name}", value=value)


def _counter(name: str, value: int) -> Counter:
    return Counter(name=f"specdec:{name}", value=value)
