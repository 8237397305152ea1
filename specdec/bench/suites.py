"""What `specdec bench` can measure: each suite is a function from a Bench to rows of a table."""

from collections.abc import Callable, Iterable, Iterator
from itertools import product

from specdec.bench.bench import MOST_CONTEXT, Bench
from specdec.bench.cold import capture, memory, starts
from specdec.bench.exactness import exactness
from specdec.bench.loop import loop, noise
from specdec.bench.pair import EngineSpec, bytes_of, joined
from specdec.bench.products import products
from specdec.bench.report import Row
from specdec.bench.requests import requests
from specdec.bench.serving import Served, generate, greedy, serve
from specdec.bench.timing import Spread, time_phases, time_rounds, tokens_needed
from specdec.bench.trees import trees
from specdec.engine import Engine
from specdec.sizes import BLOCK_SIZE
from specdec.start.speculation import Drafting

LENGTHS = (64, 128, 256, 512, 1024, 2048, 8192, 16384)  # of first_token's prompts
LONGEST_EAGER = 2048  # from there on launching op by op costs nothing
NUM_REQUESTS = 12  # of each length; the first two warm up


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
            floor = bytes_of(bench.pair).floor_ms(K, bench.bandwidth)
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
    floor = bytes_of(bench.pair).floor_ms(K, bench.bandwidth)
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
        *(protocol, rounds, exactness, context, products, loop, noise, trees, requests),
        *(first_token, cold),
    )
}
