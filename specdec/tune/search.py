"""The search: for each product the fastest candidate of every row class, written as it is found.

The number of splits is the same for every number of rows, since it decides the order of a sum. It
is given, or chosen here, for the shipped table only: the one with the least sum of times over three
row classes, each over the best for its class, few rows counting double, and reading counted in.
"""

import fcntl
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specdec.kernels.tables import NONE, Entry, key_of, read_table, write_table
from specdec.kernels.tile_rule import candidates, rule_shape, rule_splits
from specdec.kernels.tile_shapes import ROW_CLASSES, Product, Shape
from specdec.kernels.tiles import cut
from specdec.tune.gpu_clock import GpuClock, Job

SPLIT_CLASSES = (16, 64, 256)  # decide the splits
FEW_ROWS = SPLIT_CLASSES[0]
READING = 0.01  # share of a product's time for which its reader adds a further split
HEAD = f"{'product':<20} {'splits':>6} {'rows':>5} {'by rule':>10} {'tuned':>10} {'cuBLAS':>10}"


class Wanted(NamedTuple):
    """The numbers of splits to choose from for a product, and its row classes."""

    splits: Sequence[int]
    rows: Sequence[int]


class Best(NamedTuple):
    """The fastest tiles of a product and row class, in microseconds."""

    shape: Shape
    us: float
    rule_us: float
    cublas_us: float

    def as_json(self) -> dict[str, object]:
        """Write None in place of the rule's or cuBLAS's time if it did not run."""
        times = {"rule_us": finite(self.rule_us), "cublas_us": finite(self.cublas_us)}
        return self._asdict() | times


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is known of one product; `times` are all candidates', by row class and splits."""

    product: Product
    splits: int
    rows: dict[int, Best]
    times: dict[tuple[int, int, Shape], float]

    @property
    def entry(self) -> Entry:
        return Entry(self.splits, {rows: best.shape for rows, best in self.rows.items()})

    def table(self) -> str:
        """Write a line for every row class, in microseconds, below HEAD."""
        return "\n".join(
            f"{self.product!s:<20} {self.splits:>6} {rows:>5} "
            f"{best.rule_us:>10.1f} {best.us:>10.1f} {best.cublas_us:>10.1f}"
            for rows, best in sorted(self.rows.items())
        )

    def as_json(self) -> dict[str, object]:
        """List the times of all candidates that ran: [rows, splits, tiles, microseconds]."""
        return {
            "product": key_of(self.product),
            "splits": self.splits,
            "rows": {str(rows): best.as_json() for rows, best in sorted(self.rows.items())},
            "times": [
                [rows, splits, list(shape), us]
                for (rows, splits, shape), us in self.times.items()
                if us < math.inf
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """splits_of: what to try for a product. file: the table that grows; None: none is written.

    again: measure what the table has too; else a product's missing row classes, with its splits
    """

    clock: GpuClock
    gpu: str
    file: Path | None
    splits_of: Callable[[Product], Sequence[int]]
    again: bool = False

    def missing(self, products: Sequence[Product]) -> list[Product]:
        """List the products whose entry lacks a row class, or was measured with other splits."""
        wanted = self._wanted(products)
        return [product for product in products if wanted[product].rows]

    def run(self, products: Sequence[Product]) -> Iterator[Measured]:
        """Measure one product after another, and write each before the next one begins.

        ValueError before the first one if the file cannot be written.
        """
        if self.file is not None and products:
            _refuse_read_only(self.file.parent)
        wanted = self._wanted(products)
        self.clock.prepare(
            job for p in products for job in jobs_of(p, wanted[p], self.clock.has_wgmma)
        )
        for product in products:
            measured = measure(product, wanted[product], self.clock)
            self._write(measured)
            yield measured

    def _wanted(self, products: Sequence[Product]) -> dict[Product, Wanted]:
        known = {} if self.file is None or self.again else read_table(self.file).get(self.gpu, {})
        return {product: self._wanted_of(product, known.get(product)) for product in products}

    def _wanted_of(self, product: Product, entry: Entry | None) -> Wanted:
        counts = self.splits_of(product)
        if entry is None or entry.splits not in counts:
            return Wanted(counts, ROW_CLASSES)
        return Wanted((entry.splits,), [rows for rows in ROW_CLASSES if rows not in entry.rows])

    def _write(self, measured: Measured) -> None:
        """Keep row classes that were measured before with the same splits."""
        if self.file is None:
            return
        with _locked(self.file):
            table = read_table(self.file)
            of_gpu = table.setdefault(self.gpu, {})
            known = of_gpu.get(measured.product, NONE)
            rows = dict(known.rows) if known.splits == measured.splits else {}
            rows |= measured.entry.rows
            of_gpu[measured.product] = Entry(measured.splits, rows)
            write_table(self.file, table)


def jobs_of(product: Product, wanted: Wanted, has_wgmma: bool) -> Iterator[Job]:
    """List all that `measure` may ask of its clock, except cuBLAS."""
    counts = wanted.splits
    for count in dict.fromkeys((*counts, _rule_count(product, counts))):
        for rows in wanted.rows:
            for shape in candidates(product, rows, count, has_wgmma):
                yield Job(product, rows, cut(shape, rows, count))


def measure(product: Product, wanted: Wanted, clock: GpuClock) -> Measured:
    """Where there is a choice of splits, all row classes are wanted."""
    search = _Search(product, clock, {})
    counts = wanted.splits
    if len(counts) > 1:
        for rows in SPLIT_CLASSES:
            for count in counts:
                search.best(rows, count)
    splits = min(counts, key=lambda count: search.cost(count, counts))
    found = {
        rows: search.result(rows, splits, _rule_count(product, counts)) for rows in wanted.rows
    }
    return Measured(product=product, splits=splits, rows=found, times=search.times)


@dataclass(frozen=True, slots=True)
class _Search:
    """Times of one product so far, by row class, splits and shape; none is measured twice."""

    product: Product
    clock: GpuClock
    times: dict[tuple[int, int, Shape], float]

    def best(self, rows: int, splits: int) -> Shape:
        """Find the fastest candidate."""
        shapes = candidates(self.product, rows, splits, self.clock.has_wgmma)
        best = min(shapes, key=lambda shape: self.time(rows, splits, shape))
        if self.time(rows, splits, best) == float("inf"):
            raise ValueError(f"{self.product}: no tiles for {rows} rows run on this GPU")
        return best

    def cost(self, splits: int, counts: Sequence[int]) -> float:
        """Weigh a number of splits by its times over the best, where there is a choice."""
        if len(counts) == 1:
            return 0.0
        total = 0.0
        for rows in SPLIT_CLASSES:
            least = min(self.time(rows, count, self.best(rows, count)) for count in counts)
            weight = 2 if rows == FEW_ROWS else 1
            total += weight * self.time(rows, splits, self.best(rows, splits)) / least
        return total * (1 + READING * (splits - 1))

    def result(self, rows: int, splits: int, rule_count: int) -> Best:
        best = self.best(rows, splits)
        by_rule = rule_shape(self.product, rows, rule_count, self.clock.has_wgmma)
        return Best(
            shape=best,
            us=self.time(rows, splits, best),
            rule_us=self.time(rows, rule_count, by_rule),
            cublas_us=self.clock.time(Job(self.product, rows, None)),
        )

    def time(self, rows: int, splits: int, shape: Shape) -> float:
        key = (rows, splits, shape)
        if key not in self.times:
            self.times[key] = self.clock.time(Job(self.product, rows, cut(shape, rows, splits)))
        return self.times[key]


def _refuse_read_only(directory: Path) -> None:
    """Create the directory; ValueError if nothing can be written there."""
    advice = "make it writable, or set SPECDEC_CACHE_DIR"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{directory}: {error.strerror}; {advice}") from error
    if not os.access(directory, os.W_OK):
        raise ValueError(f"{directory}: not writable; {advice}")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with open(file.with_name(f"{file.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file
        yield


def _rule_count(product: Product, counts: Sequence[int]) -> int:
    """Count the splits that a product has without a table."""
    if product.kind != "split":
        return 1
    return counts[0] if len(counts) == 1 else rule_splits(product.N, product.K)


def finite(value: float) -> float | None:
    """Replace what JSON has no number for by None."""
    return value if math.isfinite(value) else None
