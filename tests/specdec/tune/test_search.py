"""The search with a clock of ours: it writes the best, resumes, chooses parts only if asked."""

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.part_choice import PART_CLASSES, best_order, orders_to_try
from specdec.kernels.sum_order import Order
from specdec.kernels.tables import Entry, Table, read_table, write_table
from specdec.kernels.tile_rule import candidates, rule_shape
from specdec.kernels.tile_shapes import PARALLEL_ROWS, ROW_CLASSES, Product, Shape
from specdec.kernels.tiles import of_rows
from specdec.tune import search as search_module
from specdec.tune.search import Job, Tuning, jobs_of, measure

SHAPE = Shape(64, 16, 64, 3, 4)
SPLIT = Product("split", 4096, 4096)
HEAD = Product("whole", 32000, 4096)
INFINITE = float("inf")
ONE, TWO, FOUR = Order(1, 1), Order(4, 2), Order(4, 4)


class FakeClock:
    """Every job takes what `microseconds` says; remembers what it was asked."""

    has_wgmma = False

    def __init__(self, microseconds: Callable[[Job], float]) -> None:
        self.microseconds = microseconds
        self.prepared: set[Job] = set()
        self.timed: list[Job] = []

    def prepare(self, jobs) -> None:
        self.prepared |= set(jobs)

    def time(self, job: Job) -> float:
        self.timed.append(job)
        return self.microseconds(job)


def fastest(shapes: dict[int, Shape], parts: int = 1) -> Callable[[Job], float]:
    """The given shape of each row class takes 1, with so many parts; all else 2 or more."""

    def microseconds(job: Job) -> float:
        if job.tiles is None:
            return 1.5
        wanted = shapes[job.rows]
        is_best = all(getattr(job.tiles, name) == getattr(wanted, name) for name in Shape._fields)
        wanted_parts = 1 if job.rows > PARALLEL_ROWS else parts
        return (1.0 if is_best else 2.0) + abs(job.tiles.parts - wanted_parts)

    return microseconds


def last_candidates(product: Product, order: Order = ONE) -> dict[int, Shape]:
    return {rows: candidates(product, rows, of_rows(order, rows))[-1] for rows in ROW_CLASSES}


@pytest.fixture
def tuning(tmp_path):
    """tuning(clock, **options): it writes tmp_path/tiles.json, for two parts of four splits."""

    def make(clock: FakeClock, **options: object) -> Tuning:
        given = {"order_of": lambda product: TWO if product.kind == "split" else ONE}
        given |= {"clock": clock, "gpu": "GPU", "file": tmp_path / "tiles.json"}
        return Tuning(**given | options)

    return make


def test_the_fastest_of_every_row_class_is_written(tuning):
    best = last_candidates(HEAD)
    search = tuning(FakeClock(fastest(best)))
    (measured,) = search.run([HEAD])

    assert read_table(search.file)["GPU"][HEAD].rows == best
    assert {each.us for each in measured.rows.values()} == {1.0}
    for rows, each in measured.rows.items():
        is_rule = rule_shape(HEAD, rows, ONE) == best[rows]
        assert (each.rule_us, each.cublas_us) == (1.0 if is_rule else 2.0, 1.5)


def test_no_candidate_is_measured_twice_or_without_being_compiled(tuning):
    clock = FakeClock(fastest(last_candidates(SPLIT, TWO), 2))
    list(tuning(clock).run([SPLIT]))
    ours = [job for job in clock.timed if job.tiles is not None]
    assert len(ours) == len(set(ours))
    assert set(ours) == clock.prepared == set(jobs_of(SPLIT, TWO, ROW_CLASSES, False))


def test_what_is_measured_is_not_measured_again(tuning):
    search = tuning(FakeClock(fastest(last_candidates(SPLIT, TWO), 2)))
    assert search.missing([SPLIT, HEAD]) == [SPLIT, HEAD]
    list(search.run([SPLIT]))
    assert search.missing([SPLIT, HEAD]) == [HEAD]
    assert tuning(search.clock, gpu="another").missing([SPLIT]) == [SPLIT]
    assert tuning(search.clock, order_of=lambda _: FOUR).missing([SPLIT]) == [SPLIT]


def test_only_missing_row_classes_are_measured_with_the_parts_of_the_others(tuning):
    clock = FakeClock(lambda _: 1.0)
    search = tuning(clock, order_of=lambda _: FOUR)
    known = Entry(4, {rows: SHAPE for rows in ROW_CLASSES if rows != 160})
    write_table(search.file, {"GPU": {SPLIT: known}})
    (measured,) = search.run(search.missing([SPLIT]))
    assert {(job.rows, job.tiles.parts) for job in clock.prepared} >= {(160, 4)}
    assert list(measured.rows) == [160]
    entry = read_table(search.file)["GPU"][SPLIT]
    assert (entry.parts, entry.rows) == (4, {**known.rows, 160: measured.rows[160].shape})
    (whole,) = tuning(clock, order_of=lambda _: FOUR, again=True).run([SPLIT])
    assert tuple(whole.rows) == ROW_CLASSES


def test_an_interrupt_keeps_what_was_measured(tuning):
    def microseconds(job: Job) -> float:
        if job.product == HEAD and job.rows == 64:
            raise KeyboardInterrupt
        return 1.0

    search = tuning(FakeClock(microseconds))
    with pytest.raises(KeyboardInterrupt):
        list(search.run([SPLIT, HEAD]))
    assert list(read_table(search.file)["GPU"]) == [SPLIT]


def test_a_product_more_leaves_the_others_as_they_are(tuning):
    search = tuning(FakeClock(lambda _: 1.0))
    list(search.run([SPLIT]))
    before = read_table(search.file)["GPU"][SPLIT]
    list(tuning(search.clock, gpu="another").run([HEAD]))
    assert read_table(search.file)["GPU"] == {SPLIT: before}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_directory_that_cannot_be_written_is_refused_before_anything(
    tuning, tmp_path, monkeypatch, is_there
):
    clock = FakeClock(lambda _: 1.0)
    directory = tmp_path / "cache"
    if is_there:
        monkeypatch.setattr(os, "access", lambda path, mode: path != directory)
    else:
        directory.write_text("a file")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(directory))}: .*SPECDEC_CACHE_DIR"):
        list(tuning(clock, file=directory / "tiles.json").run([SPLIT]))
    assert (clock.prepared, clock.timed) == (set(), [])


def test_two_searches_at_once_lose_nothing(tuning, monkeypatch):
    def write_slowly(file: Path, table: Table) -> None:
        time.sleep(0.2)
        write_table(file, table)

    monkeypatch.setattr(search_module, "write_table", write_slowly)
    searches = [tuning(FakeClock(lambda _: 1.0)) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda search, product: list(search.run([product])), searches, [SPLIT, HEAD]))
    assert set(read_table(searches[0].file)["GPU"]) == {SPLIT, HEAD}


def test_given_parts_are_the_only_ones_measured(tuning):
    clock = FakeClock(fastest(last_candidates(SPLIT, FOUR), 4))
    (measured,) = tuning(clock).run([SPLIT])
    assert measured.parts == 2
    ours = [job for job in clock.timed if job.tiles is not None]
    assert {job.tiles.parts for job in ours if job.rows <= PARALLEL_ROWS} == {2}
    assert {job.tiles.parts for job in ours if job.rows > PARALLEL_ROWS} == {1}
    assert {job.tiles.splits for job in ours} == {4}


def test_tiles_that_no_longer_suit_the_order_are_measured_again(tuning):
    search = tuning(FakeClock(lambda _: 1.0))
    large = Shape(128, 256, 64, 4, 4, 1)  # holds one sum
    known = Entry(2, {**dict.fromkeys(ROW_CLASSES, SHAPE), 512: large, 4096: large})
    write_table(search.file, {"GPU": {SPLIT: known}})
    assert search.missing([SPLIT]) == [SPLIT]
    (measured,) = search.run([SPLIT])
    assert list(measured.rows) == [512, 4096]


@pytest.mark.parametrize("order", [TWO, FOUR])
def test_the_best_parts_are_chosen_by_three_row_classes(order):
    clock = FakeClock(fastest(last_candidates(SPLIT, order), order.parts))
    assert best_order(SPLIT, clock) == order
    assert {job.rows for job in clock.timed} == set(PART_CLASSES)
    assert {job for job in clock.timed if job.tiles is not None} == clock.prepared


def test_few_rows_count_double_for_the_parts():
    def microseconds(job: Job) -> float:
        if job.tiles is None:
            return 1.0
        return {(16, 2): 1.3, (64, 4): 1.2, (256, 4): 1.2}.get((job.rows, job.tiles.parts), 1.0)

    assert best_order(SPLIT, FakeClock(microseconds)) == FOUR


def test_only_long_sums_are_cut_into_many_parts():
    assert orders_to_try(SPLIT) == (TWO, FOUR)
    assert orders_to_try(Product("split", 1024, 1024)) == (TWO,)
    assert orders_to_try(Product("split", 4096, 1024)) == (Order(2, 1), Order(2, 2))
    assert orders_to_try(HEAD) == (ONE,)


def test_candidates_that_do_not_run_lose_and_nothing_to_run_is_an_error(tuning):
    only = last_candidates(HEAD)[16]

    def microseconds(job: Job) -> float:
        is_only = job.rows != 16 or job.tiles is None or job.tiles.num_stages == only.num_stages
        return 1.0 if is_only else INFINITE

    (measured,) = tuning(FakeClock(microseconds)).run([HEAD])
    assert measured.rows[16].shape.num_stages == only.num_stages
    with pytest.raises(ValueError, match="whole 32000x4096: no tiles for 16 rows run on this GPU"):
        measure(HEAD, ONE, ROW_CLASSES, FakeClock(lambda _: INFINITE))
