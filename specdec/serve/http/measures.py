"""A server's figures are written for Prometheus, in vLLM's names with the prefix `specdec:`.

Counts are the engine's own (requests/metrics.py), asked for at each scrape; times are taken from
outputs as they are sent.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from specdec.requests.metrics import PREFIX, Counter, Gauge, Metric, Vector
from specdec.requests.output import RequestOutput

Scalars = CounterMetricFamily | GaugeMetricFamily

HELP = {
    "steps": "Batches by kind of graph",
    "step_rows": "Rows without padding",
    "compilations_after_start": "Kernels that requests waited for",
}
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5)
SECONDS_BUCKETS = (0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 1.0, 2.5, 10.0)


class Measures:
    """Holds the figures of one server, each with the label model_name."""

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
        """Return a timer for one request."""
        return Timer(self._first_token, self._gap, self._whole)

    def text(self, engine: Sequence[Metric]) -> bytes:
        """Write all figures in Prometheus' text form."""
        self._collector.engine = engine
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
    """Collects the engine's counts as of the last scrape."""

    def __init__(self, model_name: str) -> None:
        self.engine: Sequence[Metric] = ()
        self._model_name = model_name

    def collect(self) -> Iterable[Family]:
        """Return a family for each name, in the engine's order."""
        families: dict[str, Scalars] = {}
        for metric in self.engine:
            is_vector = isinstance(metric, Vector)
            labels = [*metric.labels, *(["position"] if is_vector else [])]
            kind = GaugeMetricFamily if isinstance(metric, Gauge) else CounterMetricFamily
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


def _family(kind: type[Scalars], name: str, labels: Iterable[str]) -> Scalars:
    short = name.removeprefix(PREFIX)
    words = HELP.get(short, short.replace("_", " "))
    return kind(name, words, labels=["model_name", *labels])
