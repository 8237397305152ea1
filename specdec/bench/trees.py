"""Draft trees beside chains and plain decoding, with drafts that stop and without.

K is a tree's number of levels, and its rows are those that a request verifies in a round. Sampled,
all prompts are served with each of a few seeds: texts differ in how well they can be foretold.
Engines whose drafts stop are measured at thresholds that stop never (below 0: what the decisions
cost), now and then, and after one level almost always (what levels cost that were stopped).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from specdec.bench.bench import Bench
from specdec.bench.pair import EngineSpec
from specdec.bench.report import Row
from specdec.bench.serving import GREEDY, Served, first_difference, merged, serve
from specdec.engine import Engine
from specdec.requests.params import SamplingParams
from specdec.requests.stats import SpeculationStats
from specdec.sizes import TreeShape
from specdec.start.measure_costs import NEVER

TEMPERATURES = (0.0, 0.7, 1.0)
SEEDS = (0, 1)


def _shapes(*shapes: tuple[int, int, int]) -> tuple[TreeShape, ...]:
    """Make shapes of rows, levels and top_k."""
    return tuple(TreeShape(num_levels=D, top_k=k, num_nodes=N - 1) for N, D, k in shapes)


SHAPES = _shapes((8, 6, 4), (16, 6, 4), (32, 6, 4))
GREEDY_SHAPES = _shapes((8, 6, 2), (16, 6, 2), (8, 6, 8), (16, 6, 8), (32, 6, 8))
THRESHOLDS = {0.0: (NEVER, 0.1, 0.2, 0.3, 0.999)}  # by temperature
THRESHOLD = 0.2  # at other temperatures, and of engines until they are told others


def trees(bench: Bench) -> Iterator[Row]:
    """Compare plain decoding, each K as a chain, and trees at every batch and temperature.

    Drafts stop in the longest chain and in the trees that were asked for, or those of SHAPES; of
    GREEDY_SHAPES, where none were asked for, one run at 0 is all.
    """
    if bench.pair.eagle is None:
        return
    plain: dict[tuple[int, float], Served] = {}
    kinds: list[tuple[int, TreeShape | None, bool]] = []
    for K in bench.ks:
        kinds += [(K, None, stops) for stops in (False, True)[: 1 + (max(bench.ks) == K)] if K > 0]
    options = bench.options
    shapes = SHAPES if options.trees is None else options.trees
    greedy_shapes = GREEDY_SHAPES if options.trees is None else ()
    kinds += [(tree.num_levels, tree, stops) for tree in shapes for stops in (False, True)]
    kinds += [(tree.num_levels, tree, False) for tree in greedy_shapes]
    for K, tree, stops in kinds:
        spec = _spec(bench, K, tree, stops)
        temperatures: Sequence[float] = options.temperatures or TEMPERATURES
        if tree in greedy_shapes:
            temperatures = [T for T in temperatures if T == 0]
        for batch, temperature in product(options.batches, temperatures):
            yield from _rows(bench, spec, batch, temperature, plain)
        bench.pair.drop(spec)


def _rows(
    bench: Bench,
    spec: EngineSpec,
    batch: int,
    temperature: float,
    plain: dict[tuple[int, float], Served],
) -> Iterator[Row]:
    """Measure an engine at one load, and plain decoding where that was not measured yet."""
    name = spec.tree or f"K = {spec.num_speculative_tokens}"
    thresholds: tuple[float | None, ...] = (None,)
    if spec.confidence_threshold > 0:
        known = THRESHOLDS.get(temperature, (THRESHOLD,))
        thresholds = tuple(bench.options.thresholds or known)
    for threshold in thresholds:
        if bench.has_time(f"trees: {name}, batch {batch}, temperature {temperature}"):
            params = replace(GREEDY, temperature=temperature)
            key = batch, temperature
            if key not in plain:
                plain[key] = _run(bench, spec, batch, replace(params, speculate=False))
                yield _row(None, temperature, None, plain[key], plain[key])
            run = _run(bench, spec, batch, params, threshold)
            yield _row(spec, temperature, threshold, run, plain[key])


def _spec(bench: Bench, K: int, tree: TreeShape | None, stops: bool) -> EngineSpec:
    """Keep the default sizes of graphs: rounds are not padded once some requests have ended."""
    return EngineSpec(
        num_speculative_tokens=K,
        tree=tree,
        confidence_threshold=THRESHOLD if stops else 0.0,
        max_num_seqs=bench.options.max_num_seqs or max(bench.options.batches),
        max_tokens=max(map(len, bench.pair.prompts)) + bench.options.max_tokens,
        max_model_len=bench.options.model_len,
    )


def _run(
    bench: Bench,
    spec: EngineSpec,
    batch: int,
    params: SamplingParams,
    threshold: float | None = None,
) -> Served:
    """Take the fastest of some greedy runs; else one run over all seeds."""
    engine = bench.pair.engine(spec)
    _set_threshold(engine, threshold)
    prompts = bench.prompts(batch)
    max_tokens = bench.options.max_tokens
    serve(engine, prompts[:batch], batch, min(max_tokens, 16), params)  # warm-up
    if params.temperature > 0:
        seeds = (replace(params, seed=seed) for seed in SEEDS)
        return merged([serve(engine, prompts, batch, max_tokens, each) for each in seeds])
    runs = (serve(engine, prompts, batch, max_tokens, params) for _ in range(bench.options.repeats))
    return max(runs, key=lambda run: run.tokens_per_second)


def _set_threshold(engine: Engine, threshold: float | None) -> None:
    """Stop drafts below it from the next step on. None: as the engine was built."""
    if threshold is not None:
        assert engine.runner.threshold is not None, "an engine whose drafts never stop"
        engine.runner.stop_below(threshold)


def _row(
    spec: EngineSpec | None, temperature: float, threshold: float | None, run: Served, plain: Served
) -> Row:
    """Give no figures for a wrong engine. spec: None: plain decoding."""
    tree = None if spec is None else spec.tree
    K = 0 if spec is None else spec.num_speculative_tokens
    row: Row = {
        "temperature": temperature,
        "batch": run.batch,
        "num_speculative_tokens": K,
        "rows": K + 1 if tree is None else tree.num_nodes + 1,
        "top_k": 1 if tree is None else tree.top_k,
        "threshold": threshold,
    }
    difference = first_difference(run.token_ids, plain.token_ids)
    if difference is not None:
        return row | {"refused": difference}
    return row | {
        "tokens_per_second": run.tokens_per_second,
        "against_plain": run.tokens_per_second / plain.tokens_per_second,
        "round_ms": run.round_ms,
        "mean_acceptance_length": run.stats.mean_acceptance_length,
        **_per_round(run.stats),
    }


def _per_round(stats: SpeculationStats) -> Row:
    """Average the drafts that were verified, and the deepest level of these."""
    rounds = max(stats.num_rounds, 1)
    names = {"verified": stats.num_drafted, "levels": stats.num_levels}
    return {name: sum(counts) / rounds for name, counts in names.items()}
