"""Figures of a server for Prometheus, in vLLM's names with the prefix `specdec:`.

Counts are the engine's, asked for at each scrape; times are taken from outputs as they are sent.
"""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from graphs.counters import GraphCounters
from specdec.requests.metrics import Counter, Gauge, Metric, Vector
from specdec.requests.output import RequestOutput

Scalars = CounterMetricFamily | GaugeMetricFamily

PREFIX = "specdec:"
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5)
SECONDS_BUCKETS = (0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 1.0, 2.5, 10.0)


class Measures:
    """Of one server. Every figure has the label model_name."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._collector = EngineFigures(model_name)
        self._registry.register(self._collector)
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token",
            (*FIRST_TOKEN_BUCKETS, *SECONDS_BUCKETS),
        )
        self._gap = self._histogram(
            "inter_token_latency_seconds", "Between two deliveries of a request", GAP_BUCKETS
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds",
            "From a request's arrival at the engine to its last token",
            (*FIRST_TOKEN_BUCKETS, *SECONDS_BUCKETS),
        )

    def begin(self) -> "Timer":
        """For the outputs of one request."""
        return Timer(self._first_token, self._gap, self._whole)

    def text(
        self, engine: Sequence[Metric], graphs: Mapping[str, GraphCounters], num_late: int
    ) -> bytes:
        """All figures, in Prometheus' text form. num_late: compilations after the start."""
        self._collector.engine = engine
        self._collector.graphs = graphs
        self._collector.num_late = num_late
        return generate_latest(self._registry)

    def _histogram(self, name: str, words: str, buckets: Sequence[float]) -> Histogram:
        found = Histogram(
            PREFIX + name, words, ["model_name"], registry=self._registry, buckets=buckets
        )
        return found.labels(self._model_name)


class Timer:
    """Reads times from the outputs of one request."""

    def __init__(self, first_token: Histogram, gap: Histogram, whole: Histogram) -> None:
        self._first_token = first_token
        self._gap = gap
        self._whole = whole
        self._last: float | None = None

    def see(self, output: RequestOutput) -> None:
        """Observe what is new in an output."""
        stats = output.stats
        now = stats.last_token_time
        if now is None or stats.first_token_time is None:
            return
        if self._last is None:
            self._first_token.observe(stats.first_token_time - stats.arrival_time)
            self._last = stats.first_token_time
        if now > self._last:
            self._gap.observe(now - self._last)
            self._last = now
        if output.finished:
            self._whole.observe(now - stats.arrival_time)


class EngineFigures:
    """A collector: the engine's counts as of the last scrape."""

    def __init__(self, model_name: str) -> None:
        self.engine: Sequence[Metric] = ()
        self.graphs: Mapping[str, GraphCounters] = {}
        self._labels = {"model_name": model_name}
        self.num_late = 0

    def collect(self) -> Iterable[Family]:
        """The figures of the engine, then those of its graphs."""
        families: dict[str, Scalars] = {}
        for metric in self.engine:
            self._add(families, metric)
        yield from families.values()
        yield from self._steps()
        late = CounterMetricFamily(
            f"{PREFIX}compilations_after_start",
            "Kernels that requests waited for",
            labels=[*self._labels],
        )
        late.add_metric([*self._labels.values()], self.num_late)
        yield late

    def _add(self, families: dict[str, Scalars], metric: Metric) -> None:
        labels = {**self._labels, **metric.labels}
        kind = GaugeMetricFamily if isinstance(metric, Gauge) else CounterMetricFamily
        names = [*labels, "position"] if isinstance(metric, Vector) else [*labels]
        if metric.name not in families:
            words = metric.name.removeprefix(PREFIX).replace("_", " ")
            families[metric.name] = kind(metric.name, words, labels=names)
        family = families[metric.name]
        values = list(labels.values())
        if isinstance(metric, Vector):
            for position, value in enumerate(metric.values):
                family.add_metric([*values, str(position)], value)
        elif isinstance(metric, Gauge | Counter):
            family.add_metric(values, metric.value)

    def _steps(self) -> Iterable[Family]:
        """Batches by the family of graphs that served them, and their rows."""
        labels = [*self._labels, "family", "mode"]
        steps = CounterMetricFamily(f"{PREFIX}steps", "Batches by kind of graph", labels=labels)
        rows = CounterMetricFamily(f"{PREFIX}step_rows", "Rows without padding", labels=labels)
        for name, counters in self.graphs.items():
            sums: dict[str, list[int]] = {}
            for kind, count in counters.batches.copy().items():
                found = sums.setdefault(kind.mode.name, [0, 0])
                found[0] += count
                found[1] += count * kind.unpadded_tokens
            for mode, (num_batches, num_rows) in sums.items():
                values = [*self._labels.values(), name, mode]
                steps.add_metric(values, num_batches)
                rows.add_metric(values, num_rows)
        return steps, rows
