"""What `specdec bench` can measure. A suite is a function from a Bench to rows of a table; SUITES names them.

Plain decoding of the same prompts in the same process is what every output is compared with. A row whose output
differs carries the difference instead of figures.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.bench.capture import capture_rows, memory_rows
from specdec.bench.card import Bandwidth, bytes_of
from specdec.bench.cold import cold_rows
from specdec.bench.exactness import exactness_rows
from specdec.bench.pair import EngineSpec, Pair, joined
from specdec.bench.products import product_rows
from specdec.bench.rounds import PHASES, WARMUP, time_phases, time_rounds, tokens_needed
from specdec.bench.serving import Served, best_of, first_difference, serve
from specdec.bench.timing import Spread
from specdec.engine import Engine

Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """ks: values of K for most suites. repeats: whole runs; num_rounds: timed rounds."""

    ks: tuple[int, ...] = (0, 3, 5)
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (256, 1024, 4096, 8192, 16384, 32768)
    num_prompts: int = 8
    max_tokens: int = 160
    max_model_len: int = 4096
    repeats: int = 2
    num_rounds: int = 30
    rounds_of_memory: int = 1000
    max_seconds: float | None = None


@dataclass(slots=True, eq=False)
class Bench:
    """What suites share: the pair, the options, plain decoding's outputs, and the runs that were made already."""

    pair: Pair
    bandwidth: Bandwidth
    options: BenchOptions
    plain_ids: dict[int, list[int]] = field(default_factory=dict)  # by prompt
    runs: dict[tuple[int, int], Row] = field(default_factory=dict)  # by K and batch
    began: float = field(default_factory=time.monotonic)
    skipped: list[str] = field(default_factory=list)

    @property
    def ks(self) -> tuple[int, ...]:
        """K = 0 first: the others are compared with it."""
        has_draft = self.pair.eagle is not None
        return (0, *(K for K in self.options.ks if K > 0 and has_draft))

    def has_time(self, what: str) -> bool:
        """Whether the budget lasts; else what is left out."""
        limit = self.options.max_seconds
        if limit is None or time.monotonic() - self.began < limit:
            return True
        self.skipped.append(what)
        return False

    def prompts(self, batch: int) -> list[list[int]]:
        """At least `num_prompts`, in order and over again where a batch takes more than there are."""
        prompts = self.pair.prompts
        return [prompts[i % len(prompts)] for i in range(max(self.options.num_prompts, batch))]

    def engine(self, K: int, batch: int, has_draft: bool | None = None) -> Engine:
        """An engine with graphs up to the largest batch that is asked for; for an odd K alone, a small one.

        has_draft: default, for K > 0 only: K = 0 is plain decoding
        """
        has_draft = K > 0 if has_draft is None else has_draft
        largest = max(self.options.batches, default=1)
        size = max(batch, largest) if K in self.ks or batch > 1 else batch
        longest = max(map(len, self.pair.prompts)) + max(
            self.options.max_tokens, tokens_needed(self.options.num_rounds + WARMUP, K)
        )
        return self.pair.engine(
            EngineSpec(
                num_speculative_tokens=K,
                max_num_seqs=size,
                max_tokens=longest,
                max_model_len=self.options.max_model_len,
                has_draft=has_draft and self.pair.eagle is not None,
            )
        )

    def run(self, K: int, batch: int) -> Row:
        """The protocol at one setting, once; plain decoding of the same batch first."""
        if K > 0 and (0, batch) not in self.runs:
            self.run(0, batch)
        if (K, batch) not in self.runs:
            prompts = self.prompts(batch)
            best, runs = best_of(self.engine(K, batch), prompts, batch, self.options.max_tokens, self.options.repeats)
            difference = self.difference(runs)
            self.runs[K, batch] = self._row(K, best) if difference is None else refused(K, batch, difference)
        return self.runs[K, batch]

    def difference(self, runs: Sequence[Served]) -> str | None:
        """Where any run differs from plain decoding, which the first run of K = 0 stands for."""
        num_prompts = len(self.pair.prompts)
        for run in runs:
            plain = [self.plain_ids.setdefault(i % num_prompts, ids) for i, ids in enumerate(run.token_ids)]
            difference = first_difference(run.token_ids, plain)
            if difference is not None:
                return difference
        return None

    def _row(self, K: int, run: Served) -> Row:
        plain = self.runs.get((0, run.batch), {}).get("tokens_per_second")
        return {
            "num_speculative_tokens": K,
            "batch": run.batch,
            "tokens_per_second": run.tokens_per_second,
            "against_plain": run.tokens_per_second / plain if isinstance(plain, float) else 1.0,
            "round_ms": run.round_ms,
            "mean_acceptance_length": run.stats.mean_acceptance_length,
            "per_user": run.tokens_per_second / run.batch,
        }


def refused(K: int, batch: int, difference: str) -> Row:
    """No figures for a wrong engine."""
    return {"num_speculative_tokens": K, "batch": batch, "refused": difference}


def protocol(bench: Bench) -> list[Row]:
    """Tokens per second for every K at every batch."""
    return _runs(bench, [(K, batch) for K in bench.ks for batch in bench.options.batches])


def batch_scaling(bench: Bench) -> list[Row]:
    """The same at batches 1 to the largest one asked for, in powers of two."""
    largest = max(bench.options.batches)
    sizes = sorted({*bench.options.batches, *(1 << i for i in range(largest.bit_length()))})
    return _runs(bench, [(K, batch) for K in bench.ks for batch in sizes])


def k_scaling(bench: Bench) -> list[Row]:
    """Served and timed rounds at batch 1 for K = 0 to 8, beside the floor."""
    rows = []
    for K in range(9 if bench.pair.eagle is not None else 1):
        if bench.has_time(f"k: K = {K}"):
            rows.append(bench.run(K, 1) | round_row(bench, K, 1))
    return rows


def _runs(bench: Bench, points: Sequence[tuple[int, int]]) -> list[Row]:
    return [bench.run(K, batch) for K, batch in points if bench.has_time(f"K = {K}, batch {batch}")]


def rounds(bench: Bench) -> list[Row]:
    """Where a round's time goes on the device, in steady state, beside the floor."""
    rows = []
    for K in bench.ks:
        for batch in bench.options.batches:
            if bench.has_time(f"rounds: K = {K}, batch {batch}"):
                phases = time_phases(bench.engine(K, batch), bench.prompts(batch)[:batch], bench.options.num_rounds)
                rows.append(round_row(bench, K, batch) | {name: _median(phases.get(name)) for name in PHASES})
    return rows


def round_row(bench: Bench, K: int, batch: int) -> Row:
    """A round by the device's clock: median, the middle 80 %, and the floor of its bytes."""
    spread = time_rounds(bench.engine(K, batch), bench.prompts(batch)[:batch], bench.options.num_rounds)
    floor = bytes_of(bench.pair).floor_ms(K, bench.bandwidth.reading)
    return {
        "num_speculative_tokens": K,
        "batch": batch,
        "device_round_ms": spread.median,
        "low": spread.low,
        "high": spread.high,
        "floor_ms": floor,
        "of_floor": floor / spread.median,
    }


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def zero(bench: Bench) -> list[Row]:
    """K = 0 with a loaded draft against no draft at all: two engines in turns, and their difference."""
    rows: list[Row] = []
    for batch in bench.options.batches:
        if not bench.has_time(f"zero: batch {batch}"):
            continue
        prompts, repeats = bench.prompts(batch), bench.options.repeats
        engines = {has_draft: bench.engine(0, batch, has_draft) for has_draft in (False, True)}
        best: dict[bool, float] = {}
        device: dict[bool, list[float]] = {False: [], True: []}
        for has_draft in [False, True, True, False] * repeats:
            run = serve(engines[has_draft], prompts, batch, bench.options.max_tokens)
            best[has_draft] = min(best.get(has_draft, float("inf")), run.round_ms)
            timed = time_rounds(engines[has_draft], prompts[:batch], bench.options.num_rounds)
            device[has_draft].append(timed.median)
        medians = {has_draft: Spread.of(values).median for has_draft, values in device.items()}
        rows.append(
            {
                "batch": batch,
                "plain_ms": best[False],
                "k0_ms": best[True],
                "difference": best[True] / best[False] - 1,
                "plain_device_ms": medians[False],
                "k0_device_ms": medians[True],
                "device_difference": medians[True] / medians[False] - 1,
            }
        )
    return rows


def context_scaling(bench: Bench) -> list[Row]:
    """Rounds behind long prompts at batch 1, the bundled prompts joined; their outputs compared as ever."""
    rows: list[Row] = []
    options, pair = bench.options, bench.pair
    room = max(tokens_needed(options.num_rounds + WARMUP, max(bench.ks)), options.max_tokens)
    lengths = [n for n in options.contexts if n + room <= pair.target.config.max_position_embeddings]
    plain: dict[int, Served] = {}
    for K in bench.ks:
        if not lengths or not bench.has_time(f"context: K = {K}"):
            continue
        spec = EngineSpec(
            num_speculative_tokens=K,
            max_num_seqs=1,
            max_tokens=lengths[-1] + room,
            max_model_len=lengths[-1] + room,
        )
        engine = pair.engine(spec)
        for length in lengths:
            prompt = joined(pair.prompts, length)
            run = serve(engine, [prompt], 1, min(options.max_tokens, 64))
            difference = first_difference(run.token_ids, plain.setdefault(length, run).token_ids)
            if difference is not None:
                rows.append({"context": length} | refused(K, 1, difference))
                continue
            spread = time_rounds(engine, [prompt], options.num_rounds)
            timed: Row = {"device_round_ms": spread.median, "low": spread.low, "high": spread.high}
            floor = bytes_of(pair).floor_ms(K, bench.bandwidth.reading)
            rows.append({"context": length, "num_speculative_tokens": K} | timed | {"floor_ms_of_weights": floor})
        pair.drop(spec)
    return rows


def exactness(bench: Bench) -> list[Row]:
    """What it costs that rows do not depend on their neighbours."""
    pair, options = bench.pair, bench.options
    return exactness_rows(
        pair, max(bench.ks), options.batches, options.num_rounds, options.max_model_len, bench.has_time
    )


def products(bench: Bench) -> list[Row]:
    """Every weight's product at few rows, ours and cuBLAS's, as a share of the measured bandwidth."""
    return product_rows(bench.pair, bench.bandwidth.reading, bench.has_time)


def capture(bench: Bench) -> list[Row]:
    """Seconds and memory of each family's graphs."""
    return capture_rows(bench.pair, max(bench.ks), max(bench.options.batches), bench.options.max_model_len)


def memory(bench: Bench) -> list[Row]:
    """Memory before and behind many rounds, and when the graphs are gone."""
    engine = bench.engine(max(bench.ks), max(bench.options.batches))
    rows = memory_rows(engine, bench.prompts(8)[:8], bench.options.max_tokens, bench.options.rounds_of_memory)
    bench.pair.drop()
    return rows


def cold(bench: Bench) -> list[Row]:
    """From the start of a process to its first token; the second start finds the page cache warm."""
    draft = None if bench.pair.eagle is None else str(bench.pair.eagle.report.directory)
    return cold_rows(str(bench.pair.target.report.directory), draft, max(bench.ks), bench.pair.device)


SUITES: dict[str, Callable[[Bench], list[Row]]] = {
    "protocol": protocol,
    "rounds": rounds,
    "zero": zero,
    "exactness": exactness,
    "k": k_scaling,
    "batch": batch_scaling,
    "context": context_scaling,
    "products": products,
    "capture": capture,
    "memory": memory,
    "cold": cold,
}
