"""What an engine has done since its start, as `LLM.get_metrics` reports it.

Names are vLLM's with the prefix "specdec:" where the meaning is the same; rows_verified,
levels_drafted, tree_rounds and round_tokens_* are ours. Tokens and rounds count in the step that
brings them, a prompt when it is computed; reasons, preemptions and the prefix cache when a request
ends, with all its samples.
"""

from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdec.requests.request import Request
from specdec.requests.stats import RoundRecord


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
    """Sums since the start; the cost of counting does not grow with what a request has written."""

    def __init__(self) -> None:
        self._counts = Counts[str]()
        self._reasons = Counts[str]()
        # by drafted tokens, those on the longest path, and accepted ones
        self._rounds = Counts[tuple[int, int, int]]()

    def launched(self, num_verify_rows: int) -> None:
        """A step with so many rows of requests that verify."""
        self._counts["rows_verified"] += num_verify_rows

    def prompt_ended(self, sample: Request) -> None:
        """The prompt of a sample is computed; all samples of a request have the same one."""
        if sample.index == 0:
            self._counts["prompt_tokens"] += len(sample.prompt_token_ids)

    def verified(self, record: RoundRecord) -> None:
        """A round of a request."""
        self._rounds[len(record.draft_tokens), record.num_levels, record.num_accepted] += 1

    def generated(self, num_tokens: int) -> None:
        """Tokens that a request keeps."""
        self._counts["generation_tokens"] += num_tokens

    def ended(self, samples: Sequence[Request]) -> None:
        """A request has ended, with all its samples."""
        for sample in samples:
            stats = sample.stats
            self._counts["prefix_cache_queries"] += stats.num_prompt_tokens
            self._counts["prefix_cache_hits"] += stats.num_cached_tokens
            self._counts["num_preemptions"] += stats.num_preemptions
            if sample.finish is not None:
                self._reasons[sample.finish.reason] += 1

    def metrics(
        self,
        *,
        num_running: int,
        num_waiting: int,
        cache_usage: float,
        num_levels: int,
        num_tree_rounds: int,
        round_tokens: Mapping[str, int],
    ) -> list[Metric]:
        """All of them.

        cache_usage: the share of the cache's blocks that requests hold. num_levels: levels of the
        draft that ran since the start. num_tree_rounds: steps that verified trees. round_tokens:
        predicted and measured, where drafts vary.
        """
        gauges = {
            "num_requests_running": num_running,
            "num_requests_waiting": num_waiting,
            "kv_cache_usage_perc": cache_usage,
        }
        rounds = list(dict(self._rounds).items())  # a copy: another thread may be counting
        counts = {
            **{name: self._counts[name] for name in COUNTERS},
            "levels_drafted": num_levels,
            "tree_rounds": num_tree_rounds,
            **{f"round_tokens_{name}": count for name, count in round_tokens.items()},
            "spec_decode_num_drafts": sum(n for (drafted, _, _), n in rounds if drafted),
            "spec_decode_num_draft_tokens": sum(n * drafted for (drafted, _, _), n in rounds),
            "spec_decode_num_accepted_tokens": sum(n * accepted for (*_, accepted), n in rounds),
        }
        found: list[Metric] = [_gauge(name, value) for name, value in gauges.items()]
        found += [_counter(name, value) for name, value in counts.items()]
        found += [
            Counter(name="specdec:request_success", labels={"finished_reason": reason}, value=count)
            for reason, count in sorted(dict(self._reasons).items())
        ]
        name = "specdec:spec_decode_num_accepted_tokens_per_pos"
        return [*found, Vector(name=name, values=_accepted_per_position(rounds))]


COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "rows_verified",
)


def _accepted_per_position(rounds: Sequence[tuple[tuple[int, int, int], int]]) -> list[int]:
    most = max((levels for (_, levels, _), _ in rounds), default=0)
    return [
        sum(count for (*_, accepted), count in rounds if accepted >= position)
        for position in range(1, most + 1)
    ]


def _gauge(name: str, value: float) -> Gauge:
    return Gauge(name=f"specdec:{name}", value=value)


def _counter(name: str, value: int) -> Counter:
    return Counter(name=f"specdec:{name}", value=value)
