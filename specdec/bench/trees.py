"""Draft trees beside chains and plain decoding: tokens per second, greedy and sampled.

K is a tree's number of levels, and its rows are those that a request verifies in a round.
"""

from collections.abc import Iterator
from dataclasses import replace

from specdec.bench.bench import Bench
from specdec.bench.pair import EngineSpec
from specdec.bench.report import Row
from specdec.bench.serving import GREEDY, Served, first_difference, serve
from specdec.sizes import TreeShape

TEMPERATURES = (0.0, 0.7, 1.0)
SHAPES = tuple(
    TreeShape(num_levels=levels, top_k=top_k, num_nodes=rows - 1)
    for rows, levels, top_k in ((8, 6, 4), (16, 6, 4), (16, 8, 4), (24, 8, 8), (32, 8, 8))
)


def trees(bench: Bench) -> Iterator[Row]:
    """Each K as a chain, then the trees, at every batch and temperature."""
    chains = [(K, None) for K in bench.ks]
    has_draft = bench.pair.eagle is not None
    plain: dict[tuple[int, float], Served] = {}
    for K, tree in [*chains, *((shape.num_levels, shape) for shape in SHAPES if has_draft)]:
        spec = _spec(bench, K, tree)
        for batch in bench.options.batches:
            for temperature in TEMPERATURES:
                if bench.has_time(f"trees: {spec.tree or f'K = {K}'}, batch {batch}"):
                    run = _run(bench, spec, batch, temperature)
                    expected = plain.setdefault((batch, temperature), run)
                    yield _row(spec, temperature, run, expected)
        bench.pair.drop(spec)


def _spec(bench: Bench, K: int, tree: TreeShape | None) -> EngineSpec:
    return EngineSpec(
        num_speculative_tokens=K,
        tree=tree,
        max_num_seqs=bench.options.max_num_seqs or max(bench.options.batches),
        max_tokens=max(map(len, bench.pair.prompts)) + bench.options.max_tokens,
        max_model_len=bench.options.model_len,
    )


def _run(bench: Bench, spec: EngineSpec, batch: int, temperature: float) -> Served:
    """The fastest of some runs; the seed is the same in all."""
    engine = bench.pair.engine(spec)
    prompts = bench.prompts(batch)
    max_tokens = bench.options.max_tokens
    params = replace(GREEDY, temperature=temperature, seed=0)
    serve(engine, prompts[:batch], batch, min(max_tokens, 16), params)  # warm-up
    runs = (serve(engine, prompts, batch, max_tokens, params) for _ in range(bench.options.repeats))
    return max(runs, key=lambda run: run.tokens_per_second)


def _row(spec: EngineSpec, temperature: float, run: Served, plain: Served) -> Row:
    """No figures for a wrong engine. plain: without drafts."""
    tree = spec.tree
    row: Row = {
        "temperature": temperature,
        "batch": run.batch,
        "num_speculative_tokens": spec.num_speculative_tokens,
        "rows": spec.num_speculative_tokens + 1 if tree is None else tree.num_nodes + 1,
        "top_k": 1 if tree is None else tree.top_k,
    }
    difference = first_difference(run.token_ids, plain.token_ids)
    if difference is not None:
        return row | {"refused": difference}
    return row | {
        "tokens_per_second": run.tokens_per_second,
        "against_plain": run.tokens_per_second / plain.tokens_per_second,
        "round_ms": run.round_ms,
        "mean_acceptance_length": run.stats.mean_acceptance_length,
    }
