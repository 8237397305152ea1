"""What `specdec bench` can measure: each suite is a function from a Bench to rows of a table."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product

from specdec.bench.bench import MOST_CONTEXT, Bench
from specdec.bench.cold import capture, memory, starts
from specdec.bench.drafts import drafts
from specdec.bench.exactness import exactness
from specdec.bench.experts import experts
from specdec.bench.loop import loop, noise
from specdec.bench.pair import EngineSpec, bytes_of, joined
from specdec.bench.products import products
from specdec.bench.report import Row
from specdec.bench.requests import requests
from specdec.bench.serving import GREEDY, Served, generate, greedy, serve
from specdec.bench.timing import Spread, time_phases, time_rounds, tokens_needed
from specdec.engine import Engine
from specdec.requests.stats import SpeculationStats
from specdec.sizes import BLOCK_SIZE, TreeShape
from specdec.start.measure_costs import NEVER
from specdec.start.speculation import Drafting

LENGTHS = (64, 128, 256, 512, 1024, 2048, 8192, 16384)  # of first_token's prompts
LONGEST_EAGER = 2048  # from there on launching op by op costs nothing
NUM_REQUESTS = 12  # of each length; the first two warm up
# of the suite trees
TEMPERATURES = (0.0, 0.7, 1.0)
THRESHOLDS = (NEVER, 0.1, 0.2, 0.3, 0.999)  # greedily
THRESHOLD = 0.2  # at other temperatures, and of engines until they are told others
SHAPES = tuple(TreeShape(num_levels=6, top_k=4, num_nodes=N - 1) for N in (8, 16, 32))
Plain = dict[tuple[int, float], Served]  # by batch and temperature


def protocol(bench: Bench) -> Iterator[Row]:
    """Measure tokens per second for every K at every batch."""
    plain: dict[int, Served] = {}
    for K, batch in product(bench.ks, bench.batches):
        if not bench.has_time(f"K = {K}, batch {batch}"):
            continue
        run, difference = bench.serve(bench.engine(Drafting(K)), batch)
        if K == 0:
            plain[batch] = run
        rates = run.stats.acceptance_rate_per_position
        row: Row = {"num_speculative_tokens": K, "batch": batch}
        row |= difference or {
            **run.figures(plain.get(batch)),
            "per_user": run.tokens_per_second / batch,
            "accepted_per_position": " ".join(f"{rate:.3f}" for rate in rates),
        }
        bench.results.append(row)
        yield row


def rounds(bench: Bench) -> Iterator[Row]:
    """Time rounds in steady state and their phases on the device, beside the floor."""
    num_rounds = bench.options.num_rounds
    for K, batch in product(bench.ks, bench.batches):
        if bench.has_time(f"rounds: K = {K}, batch {batch}"):
            prompts = bench.prompts(batch)[:batch]
            engine = bench.engine(Drafting(K))
            floor = bytes_of(bench.pair).floor_ms(K, batch, bench.bandwidth)
            spread = time_rounds(engine, prompts, num_rounds)
            row: Row = {"num_speculative_tokens": K, "batch": batch} | _columns(spread)
            row |= {"floor_ms": floor, "of_floor": floor / spread.median}
            yield row | time_phases(engine, prompts, num_rounds)


def _columns(spread: Spread) -> Row:
    """Give the mean too, since rounds of a tree differ by where its paths begin."""
    return spread.columns("device_round_ms") | {"mean_round_ms": spread.mean}


def context(bench: Bench) -> Iterator[Row]:
    """Time rounds after long prompts, the pair's prompts joined; outputs are compared too.

    All requests are equally long, then one is as long as the longest among the shortest. --trees
    adds rounds of these, greedy and full. verify_ms: the target's pass and its choice.
    """
    options = bench.options
    kinds = [Drafting(K) for K in bench.ks]
    kinds += [Drafting(tree.num_levels, tree=tree) for tree in options.trees or ()]
    room = max(tokens_needed(options.num_rounds, kind.num_nodes) for kind in kinds)
    room = max(room, options.max_tokens)
    longest = bench.pair.target.config.max_position_embeddings - room
    contexts = [n for n in bench.contexts if n <= longest]
    for drafting, batch in product(kinds, bench.batches):
        ways = [[n] * batch for n in contexts]
        if batch > 1 and len(contexts) > 1:
            ways.append([max(contexts)] + [min(contexts)] * (batch - 1))
        ways = [lengths for lengths in ways if sum(lengths) <= MOST_CONTEXT]
        K = drafting.num_tokens
        if not ways or not bench.has_time(f"context: {drafting.tree or f'K = {K}'}, batch {batch}"):
            continue
        spec = EngineSpec(
            drafting=drafting,
            max_num_seqs=batch,
            max_model_len=max(map(max, ways)) + room,
            max_tokens=-(-max(map(sum, ways)) // batch) + room + BLOCK_SIZE,
        )
        engine = bench.pair.engine(spec)
        for lengths in ways:
            prompts = [joined(bench.pair.prompts, length, i) for i, length in enumerate(lengths)]
            served = serve(engine, prompts, batch, min(options.max_tokens, 64))
            row: Row = {
                "longest_context": max(lengths),
                "shortest_context": min(lengths),
                "num_speculative_tokens": K,
                "rows": 1 + drafting.num_nodes,
                "batch": batch,
                "mean_acceptance_length": served.stats.mean_acceptance_length,
            }
            difference = bench.outputs.difference(served.requests)
            yield row | (difference or _context_figures(bench, engine, K, prompts))
        bench.pair.drop(spec)


def _context_figures(bench: Bench, engine: Engine, K: int, prompts: list[list[int]]) -> Row:
    spread = time_rounds(engine, prompts, bench.options.num_rounds)
    phases = time_phases(engine, prompts, bench.options.num_rounds)
    verify = sum(phases[name] or 0.0 for name in ("forward", "choose"))
    floor = bytes_of(bench.pair).floor_ms(K, len(prompts), bench.bandwidth)
    return _columns(spread) | {"verify_ms": verify, "floor_ms_of_weights": floor}


def first_token(bench: Bench) -> Iterator[Row]:
    """Time the first token of one prompt, in milliseconds, by graphs in pieces and op by op."""
    limit = bench.pair.target.config.max_position_embeddings
    lengths = [length for length in LENGTHS if length < limit]
    few = [length for length in lengths if length <= LONGEST_EAGER]
    for how, is_eager, these in (("graphs", False, lengths), ("op by op", True, few)):
        if not these or not bench.has_time(f"first_token: {how}"):
            continue
        spec = EngineSpec(
            drafting=Drafting(max(bench.ks)),
            max_num_seqs=1,
            max_model_len=these[-1] + 1,
            has_prefill_graphs=True,
            enforce_eager=is_eager,
        )
        engine = bench.pair.engine(spec)
        for length in these:
            jobs = greedy([joined(bench.pair.prompts, length)], 1)
            runs = [generate(engine, jobs) for _ in range(NUM_REQUESTS)]
            seconds = [each.stats.time_to_first_token or 0.0 for [each] in runs[2:]]
            passes = engine.runner.graphs.target.prefill.dispatch(1, length, None)
            spread = Spread.of([1e3 * each for each in seconds])
            yield {
                "prompt_tokens": length,
                "asked": how,
                "runs_as": passes.mode.name,
            } | spread.columns("ms")
        bench.pair.drop(spec)


def trees(bench: Bench) -> Iterator[Row]:
    """Compare plain decoding, each K as a chain, and trees at every batch and temperature.

    K is a tree's number of levels, and its rows are those that a request verifies in a round.
    Drafts stop in the longest chain and in the trees, at thresholds that stop never (below 0: what
    the decisions cost), now and then, and after one level almost always (what levels cost that were
    stopped). Blocks have no level at which they could stop.
    """
    eagle = bench.pair.eagle
    if eagle is None or not eagle.config.grows_trees:
        return
    shapes = SHAPES if bench.options.trees is None else bench.options.trees
    shapes = [tree for tree in shapes if tree.num_levels <= eagle.config.max_drafts]
    chains = [Drafting(K) for K in bench.ks if K > 0]
    stopping = [*chains[-1:], *(Drafting(tree.num_levels, tree=tree) for tree in shapes)]
    plain: Plain = {}
    for drafting in (*chains[:-1], *stopping):
        yield from _tree_rows(bench, drafting, plain)
        if drafting in stopping and not eagle.config.is_parallel:
            yield from _tree_rows(bench, replace(drafting, confidence_threshold=THRESHOLD), plain)


def _tree_rows(bench: Bench, drafting: Drafting, plain: Plain) -> Iterator[Row]:
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
                columns = _of_load(Drafting(0), batch, T, None)
                yield columns | (difference or run.figures(run) | _per_round(run.stats))
            if threshold is not None:
                engine.runner.stop_below(threshold)
            run, difference = bench.serve(engine, batch, params)
            columns = _of_load(drafting, batch, T, threshold)
            figures = run.figures(plain[batch, T]) | _per_round(run.stats)
            yield columns | (difference or figures)
    bench.pair.drop()


def _of_load(drafting: Drafting, batch: int, T: float, threshold: float | None) -> Row:
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


def cold(bench: Bench) -> Iterator[Row]:
    """Time two process starts up to the first token, then captures, and read memory.

    The first start compiles every kernel. It has the largest K, or with --adaptive as many drafts
    as pay, as users get it.
    """
    yield from starts(bench)
    if bench.has_time("cold: capture"):
        yield from capture(bench)
    if bench.has_time("cold: memory"):
        yield from memory(bench)


SUITES: dict[str, Callable[[Bench], Iterable[Row]]] = {
    suite.__name__: suite
    for suite in (
        *(protocol, rounds, exactness, context, products, experts, loop, noise, drafts),
        *(trees, requests, first_token, cold),
    )
}
