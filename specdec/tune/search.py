"""The search: for each product the fastest candidate of every row class, written as it is found.

The order of sums is given: the number of parts is the same for every number of rows.
"""

import fcntl
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specdec.kernels.sum_order import Order
from specdec.kernels.tables import NONE, Entry, key_of, read_table, write_table
from specdec.kernels.tile_rule import candidates, rule_shape
from specdec.kernels.tile_shapes import ROW_CLASSES, Product, Shape
from specdec.kernels.tiles import cut, fitting_rows, of_rows
from specdec.tune.gpu_clock import GpuClock, Job

HEAD = f"{'product':<20} {'parts':>6} {'rows':>5} {'by rule':>10} {'tuned':>10} {'cuBLAS':>10}"


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
    """What is known of one product; `times` are all candidates', by row class and parts."""

    product: Product
    parts: int
    rows: dict[int, Best]
    times: dict[tuple[int, int, Shape], float]

    @property
    def entry(self) -> Entry:
        return Entry(self.parts, {rows: best.shape for rows, best in self.rows.items()})

    def table(self) -> str:
        """Write a line for every row class, in microseconds, below HEAD."""
        return "\n".join(
            f"{self.product!s:<20} {self.parts:>6} {rows:>5} "
            f"{best.rule_us:>10.1f} {best.us:>10.1f} {best.cublas_us:>10.1f}"
            for rows, best in sorted(self.rows.items())
        )

    def as_json(self) -> dict[str, object]:
        """List the times of all candidates that ran: [rows, parts, tiles, microseconds]."""
        return {
            "product": key_of(self.product),
            "parts": self.parts,
            "rows": {str(rows): best.as_json() for rows, best in sorted(self.rows.items())},
            "times": [
                [rows, parts, list(shape), us]
                for (rows, parts, shape), us in self.times.items()
                if us < math.inf
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """order_of: that of a product's sums. file: the table that grows; None: none is written.

    again: measure what the table has too; else a product's missing row classes, with its parts
    """

    clock: GpuClock
    gpu: str
    file: Path | None
    order_of: Callable[[Product], Order]
    again: bool = False

    def missing(self, products: Sequence[Product]) -> list[Product]:
        """List the products whose entry lacks a row class, or was measured with other parts."""
        wanted = self._wanted(products)
        return [product for product in products if wanted[product]]

    def run(self, products: Sequence[Product]) -> Iterator[Measured]:
        """Measure one product after another, and write each before the next one begins.

        ValueError before the first one if the file cannot be written.
        """
        if self.file is not None and products:
            _refuse_read_only(self.file.parent)
        wanted = self._wanted(products)
        self.clock.prepare(
            job
            for p in products
            for job in jobs_of(p, self.order_of(p), wanted[p], self.clock.has_wgmma)
        )
        for product in products:
            measured = measure(product, self.order_of(product), wanted[product], self.clock)
            self._write(measured)
            yield measured

    def _wanted(self, products: Sequence[Product]) -> dict[Product, list[int]]:
        """List the row classes to measure of each product."""
        known = {} if self.file is None or self.again else read_table(self.file).get(self.gpu, {})
        found = {}
        for product in products:
            entry = known.get(product, NONE)
            order = self.order_of(product)
            known_rows = fitting_rows(entry, product, order)
            measured = known_rows if entry.parts == order.parts else {}
            found[product] = [rows for rows in ROW_CLASSES if rows not in measured]
        return found

    def _write(self, measured: Measured) -> None:
        """Keep row classes that were measured before with the same parts."""
        if self.file is None:
            return
        with _locked(self.file):
            table = read_table(self.file)
            of_gpu = table.setdefault(self.gpu, {})
            known = of_gpu.get(measured.product, NONE)
            rows = dict(known.rows) if known.parts == measured.parts else {}
            rows |= measured.entry.rows
            of_gpu[measured.product] = Entry(measured.parts, rows)
            write_table(self.file, table)


def jobs_of(
    product: Product, order: Order, classes: Sequence[int], has_wgmma: bool
) -> Iterator[Job]:
    """List all that `measure` may ask of its clock, except cuBLAS."""
    for rows in classes:
        for shape in candidates(product, rows, of_rows(order, rows), has_wgmma):
            yield Job(product, rows, cut(shape, rows, order))


def measure(product: Product, order: Order, classes: Sequence[int], clock: GpuClock) -> Measured:
    """Find the fastest tiles of these row classes; none is measured twice."""
    rows: dict[int, Best] = {}
    times: dict[tuple[int, int, Shape], float] = {}
    for each in classes:
        of_class = of_rows(order, each)
        shapes = candidates(product, each, of_class, clock.has_wgmma)
        by_rule = rule_shape(product, each, of_class, clock.has_wgmma)
        found = {s: clock.time(Job(product, each, cut(s, each, order))) for s in shapes}
        best = min(found, key=found.__getitem__)
        if found[best] == math.inf:
            raise ValueError(f"{product}: no tiles for {each} rows run on this GPU")
        cublas_us = clock.time(Job(product, each, None))
        rows[each] = Best(best, found[best], found[by_rule], cublas_us)
        times |= {(each, order.parts, shape): us for shape, us in found.items()}
    return Measured(product=product, parts=order.parts, rows=rows, times=times)


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


def finite(value: float) -> float | None:
    """Replace what JSON has no number for by None."""
    return value if math.isfinite(value) else None
