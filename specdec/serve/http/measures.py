"""What an operator sees of a server: figures for Prometheus, a line in the log, a record of tokens.

Figures have vLLM's names with the prefix `specdec:`. Counts are the engine's own
(requests/metrics.py), asked for at each look; times are taken from outputs as they are sent.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from specdec.requests.metrics import PREFIX, Counter, Gauge, Metric, Vector
from specdec.requests.output import RequestOutput
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.engine_thread import EngineDeadError, EngineSilentError

logger = logging.getLogger("specdec.serve")

Scalars = CounterMetricFamily | GaugeMetricFamily

HELP = {
    "steps": "Batches by kind of graph",
    "step_rows": "Rows without padding",
    "compilations_after_start": "Kernels that requests waited for",
}
SECONDS_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 1.0, 2.5, 10.0)
LOOK_SECONDS = 10.0  # from one line in the log to the next
ROUNDS = 200  # that acceptance is judged by
ALARM = 1 / 3  # of the acceptance at the start
CAUSES = (
    "the text may be of a kind that the draft was not trained on (another language or format, a "
    "higher temperature), or the draft is of another fine-tune: specdec verify TARGET DRAFT says"
)


class Measures:
    """Holds the figures of one server, each with the label model_name."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._engine: Sequence[Metric] = ()  # the engine's counts as of the last scrape
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token",
            SECONDS_BUCKETS,
        )
        self.gap = self._histogram(
            "inter_token_latency_seconds", "Between two deliveries of a request", GAP_BUCKETS
        )
        self.whole = self._histogram(
            "e2e_request_latency_seconds",
            "From a request's arrival at the engine to its last token",
            SECONDS_BUCKETS,
        )

    def text(self, engine: Sequence[Metric]) -> bytes:
        self._engine = engine
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Family]:
        """Return a family for each of the engine's names, in its order, for the registry."""
        families: dict[str, Scalars] = {}
        for metric in self._engine:
            positions = ["position"] if isinstance(metric, Vector) else []
            kind = GaugeMetricFamily if isinstance(metric, Gauge) else CounterMetricFamily
            labels = [*metric.labels, *positions]
            family = families.setdefault(metric.name, _family(kind, metric.name, labels))
            own = [self._model_name, *metric.labels.values()]
            if isinstance(metric, Vector):
                for position, value in enumerate(metric.values):
                    family.add_metric([*own, str(position)], value)
            elif isinstance(metric, Gauge | Counter):
                family.add_metric(own, metric.value)
        for name in (f"{PREFIX}steps", f"{PREFIX}step_rows"):  # shown before the first step too
            families.setdefault(name, _family(CounterMetricFamily, name, ["family", "mode"]))
        return families.values()

    def _histogram(self, name: str, words: str, buckets: Sequence[float]) -> Histogram:
        labels, registry = ["model_name"], self._registry
        found = Histogram(PREFIX + name, words, labels, registry=registry, buckets=buckets)
        return found.labels(self._model_name)


def _family(kind: type[Scalars], name: str, labels: Iterable[str]) -> Scalars:
    short = name.removeprefix(PREFIX)
    words = HELP.get(short, short.replace("_", " "))
    return kind(name, words, labels=["model_name", *labels])


class Timer:
    """Reads times from the outputs of one request."""

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._last: float | None = None

    def see(self, output: RequestOutput) -> None:
        stats = output.stats
        now = stats.last_token_time
        if now is None or stats.first_token_time is None:
            return
        if self._last is None:
            self._measures.first_token.observe(stats.first_token_time - stats.arrival_time)
            self._last = stats.first_token_time
        if now > self._last:
            self._measures.gap.observe(now - self._last)
            self._last = now
        if output.finished:
            self._measures.whole.observe(now - stats.arrival_time)


class Monitor:
    """Writes a line in the log every ten seconds while there is something to say, and an alarm."""

    def __init__(self, llm: AsyncEngine) -> None:
        self._llm = llm
        self._first: float | None = None  # accepted drafts a round in the first window
        self._is_low = False
        self._rounds = self._accepted = 0.0  # at the end of the last window
        self._before: Mapping[str, float] = {}
        self._at = time.monotonic()

    async def run(self) -> None:
        """Look until it is cancelled or the engine has failed."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                metrics = await self._llm.get_metrics()
            except EngineSilentError as error:
                logger.error("%s", error)
            except EngineDeadError:  # the log has its cause
                return
            else:
                scalars = [each for each in metrics if isinstance(each, Counter | Gauge)]
                self.look({each.name.removeprefix(PREFIX): each.value for each in scalars})

    def look(self, figures: Mapping[str, float]) -> None:
        """Log what has changed since the last look. figures: the engine's, by name."""
        new = {name: value - self._before.get(name, 0) for name, value in figures.items()}
        seconds = time.monotonic() - self._at
        self._at += seconds
        self._before = figures
        running, waiting = figures["num_requests_running"], figures["num_requests_waiting"]
        tokens, drafted = new["generation_tokens"], new["spec_decode_num_draft_tokens"]
        accepted = figures["spec_decode_num_accepted_tokens"]
        if running or waiting or tokens:
            new_accepted = new["spec_decode_num_accepted_tokens"]
            logger.info(
                "%d running, %d waiting, %.0f tokens/s, %s, cache %.0f%%",
                running,
                waiting,
                tokens / seconds,
                f"{new_accepted / drafted:.0%} accepted" if drafted else "nothing drafted",
                100 * figures["kv_cache_usage_perc"],
            )
        alarm = self.alarm(figures["spec_decode_num_drafts"], accepted)
        if alarm is not None:
            logger.warning(alarm)

    def alarm(self, rounds: float, accepted: float) -> str | None:
        """Compare windows of 200 rounds or more with the first; return an alarm once for each fall.

        rounds, accepted: since the start
        """
        if rounds - self._rounds < ROUNDS:
            return None
        rate = (accepted - self._accepted) / (rounds - self._rounds)
        self._rounds = rounds
        self._accepted = accepted
        if self._first is None:
            self._first = rate
        was_low = self._is_low
        self._is_low = rate < self._first * ALARM
        if was_low or not self._is_low:
            return None
        fall = f"{rate:.2f} accepted drafts a round, {self._first:.2f} at the start"
        return f"acceptance has fallen: {fall}; {CAUSES}"


class Record:
    """Writes token ids of finished requests, a line of JSON each, for training a draft.

    A new file in `directory`, for its owner alone; ValueError if it cannot be written. If it cannot
    any more, as where a disk is full, the log says so, and nothing more is recorded.
    """

    def __init__(self, directory: Path) -> None:
        self.file = directory / f"requests-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns()}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # no other user may read it: token ids are what users have written
            self._stream = os.fdopen(os.open(self.file, flags, 0o600), "w", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"record={str(directory)!r}: {error.strerror}") from error

    def write(self, output: RequestOutput) -> None:
        if self._stream.closed:
            return
        samples = [each.token_ids for each in output.outputs]
        line = json.dumps({"prompt_token_ids": output.prompt_token_ids, "token_ids": samples})
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except OSError as error:
            logger.error("requests are no longer recorded in %s: %s", self.file, error.strerror)
            self.close()

    def close(self) -> None:
        with suppress(OSError):  # of a line that was begun, which has been logged
            self._stream.close()
