"""Draft trees beside chains and plain decoding, with drafts that stop and without.

K is a tree's number of levels, and its rows are those that a request verifies in a round. Engines
whose drafts stop are measured at thresholds that stop never (below 0: what the decisions cost), now
and then, and after one level almost always (what levels cost that were stopped).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from specdec.bench.bench import Bench
from specdec.bench.report import Row
from specdec.bench.serving import GREEDY, Served
from specdec.requests.stats import SpeculationStats
from specdec.sizes import TreeShape
from specdec.start.measure_costs import NEVER
from specdec.start.speculation import Drafting

TEMPERATURES = (0.0, 0.7, 1.0)
THRESHOLDS = (NEVER, 0.1, 0.2, 0.3, 0.999)  # greedily
THRESHOLD = 0.2  # at other temperatures, and of engines until they are told others
SHAPES = tuple(TreeShape(num_levels=6, top_k=4, num_nodes=N - 1) for N in (8, 16, 32))
Plain = dict[tuple[int, float], Served]  # by batch and temperature


def trees(bench: Bench) -> Iterator[Row]:
    """Compare plain decoding, each K as a chain, and trees at every batch and temperature.

    Drafts stop in the longest chain and in the trees.
    """
    if bench.pair.eagle is None:
        return
    shapes = SHAPES if bench.options.trees is None else bench.options.trees
    chains = [Drafting(K) for K in bench.ks if K > 0]
    stopping = [*chains[-1:], *(Drafting(tree.num_levels, tree=tree) for tree in shapes)]
    plain: Plain = {}
    for drafting in (*chains[:-1], *stopping):
        yield from _rows(bench, drafting, plain)
        if drafting in stopping:
            yield from _rows(bench, replace(drafting, confidence_threshold=THRESHOLD), plain)


def _rows(bench: Bench, drafting: Drafting, plain: Plain) -> Iterator[Row]:
    """Measure an engine at all loads, and plain decoding where that was not measured yet."""
    options = bench.options
    name = drafting.tree or f"K = {drafting.num_tokens}"
    for batch, T in product(bench.batches, options.temperatures or TEMPERATURES):
        thresholds: tuple[float | None, ...] = (None,)
        if drafting.confidence_threshold:
            known = THRESHOLDS if T == 0 else (THRESHOLD,)
            thresholds = tuple(options.thresholds or known)
        for threshold in thresholds:
            if not bench.has_time(f"trees: {name}, batch {batch}, temperature {T}"):
                continue
            engine = bench.engine(drafting, options.max_tokens)
            params = replace(GREEDY, temperature=T)
            if (batch, T) not in plain:
                run, difference = bench.serve(engine, batch, replace(params, speculate=False))
                plain[batch, T] = run
                columns = _columns(Drafting(0), batch, T, None)
                yield columns | (difference or run.figures(run) | _per_round(run.stats))
            if threshold is not None:
                engine.runner.stop_below(threshold)
            run, difference = bench.serve(engine, batch, params)
            columns = _columns(drafting, batch, T, threshold)
            figures = run.figures(plain[batch, T]) | _per_round(run.stats)
            yield columns | (difference or figures)
    bench.pair.drop()


def _columns(drafting: Drafting, batch: int, T: float, threshold: float | None) -> Row:
    tree = drafting.tree
    return {
        "temperature": T,
        "batch": batch,
        "num_speculative_tokens": drafting.num_tokens,
        "rows": 1 + drafting.num_nodes,
        "top_k": 1 if tree is None else tree.top_k,
        "threshold": threshold,
    }


def _per_round(stats: SpeculationStats) -> Row:
    """Average the drafts that were verified, and the deepest level of these."""
    rounds = max(stats.num_rounds, 1)
    return {
        "verified": sum(stats.num_drafted) / rounds,
        "levels": sum(stats.num_levels) / rounds,
    }
