"""What `specdec bench` can measure: each suite is a function from a Bench to rows of a table."""

from collections.abc import Callable, Iterable, Iterator
from itertools import product

from specdec.bench.attention import attention
from specdec.bench.bench import MOST_CONTEXT, Bench
from specdec.bench.capture import capture, memory, padding
from specdec.bench.card import bytes_of
from specdec.bench.cold import cold_rows
from specdec.bench.costs import costs
from specdec.bench.exactness import exactness
from specdec.bench.loop import loop, ramp
from specdec.bench.noise import noise
from specdec.bench.pair import EngineSpec, turned
from specdec.bench.prefill import first_token, prefill
from specdec.bench.products import products
from specdec.bench.report import Row
from specdec.bench.requests import gaps, requests, waiting
from specdec.bench.rounds import time_phases, time_rounds, tokens_needed
from specdec.bench.serving import first_difference, serve
from specdec.bench.stops import stops
from specdec.bench.timing import Spread
from specdec.bench.trees import trees
from specdec.bench.zero import zero
from specdec.config import AUTO
from specdec.engine import Engine
from specdec.sizes import BLOCK_SIZE, TreeShape
from specdec.step import PHASES


def protocol(bench: Bench) -> Iterator[Row]:
    """Tokens per second for every K at every batch."""
    return _protocol(bench, bench.options.batches)


def batch(bench: Bench) -> Iterator[Row]:
    """The protocol at batches 1 to the largest one requested, in powers of two."""
    batches = bench.options.batches
    powers = (1 << i for i in range(max(batches).bit_length()))
    return _protocol(bench, sorted({*batches, *powers}))


def _protocol(bench: Bench, batches: Iterable[int]) -> Iterator[Row]:
    points = [(K, batch) for K in bench.ks for batch in batches]
    return (bench.run(K, B) for K, B in points if bench.has_time(f"K = {K}, batch {B}"))


def k(bench: Bench) -> Iterator[Row]:
    """The protocol and timed rounds at batch 1 for K = 0 to 8, beside the floor."""
    for K in range(9 if bench.pair.eagle is not None else 1):
        if bench.has_time(f"k: K = {K}"):
            row = bench.run(K, 1)
            yield row if "refused" in row else row | _round_row(bench, K, 1)


def rounds(bench: Bench) -> Iterator[Row]:
    """Where a round's time goes on the device, in steady state, beside the floor."""
    num_rounds = bench.options.num_rounds
    for K, batch in [(K, batch) for K in bench.ks for batch in bench.options.batches]:
        if "refused" in bench.runs.get((K, batch), {}):
            yield bench.runs[K, batch]
        elif bench.has_time(f"rounds: K = {K}, batch {batch}"):
            prompts = bench.prompts(batch)[:batch]
            phases = time_phases(bench.engine(K, batch), prompts, num_rounds)
            medians = {name: phases[name].median if name in phases else None for name in PHASES}
            yield _round_row(bench, K, batch) | medians


def _round_row(bench: Bench, K: int, batch: int) -> Row:
    """A round by the device's clock, and the floor of its bytes."""
    prompts = bench.prompts(batch)[:batch]
    spread = time_rounds(bench.engine(K, batch), prompts, bench.options.num_rounds)
    floor = bytes_of(bench.pair).floor_ms(K, bench.bandwidth.reading)
    row: Row = {"num_speculative_tokens": K, "batch": batch}
    return row | _columns(spread) | {"floor_ms": floor, "of_floor": floor / spread.median}


def _columns(spread: Spread) -> Row:
    """With the mean, since rounds of a tree differ by where its paths begin."""
    return {
        "device_round_ms": spread.median,
        "low": spread.low,
        "high": spread.high,
        "mean_round_ms": spread.mean,
    }


def context(bench: Bench) -> Iterator[Row]:
    """Rounds after long prompts, the pair's prompts joined; outputs are compared too.

    All requests as long, and one as long as the longest among the shortest ones; with --trees,
    rounds of these too, greedy and full. verify_ms: of it, the target's pass and its choice.
    """
    options = bench.options
    kinds: list[tuple[int, TreeShape | None]] = [(K, None) for K in bench.ks]
    kinds += [(tree.num_levels, tree) for tree in options.trees or ()]
    most_drafts = max(K if tree is None else tree.num_nodes for K, tree in kinds)
    room = max(tokens_needed(options.num_rounds, most_drafts), options.max_tokens)
    longest = bench.pair.target.config.max_position_embeddings - room
    plain: dict[tuple[int, ...], list[list[int]]] = {}
    for (K, tree), batch in product(kinds, options.batches):
        contexts = [n for n in options.contexts if n <= longest]
        ways = [[n] * batch for n in contexts]
        if batch > 1 and len(contexts) > 1:
            ways.append([max(contexts)] + [min(contexts)] * (batch - 1))
        ways = [lengths for lengths in ways if sum(lengths) <= MOST_CONTEXT]
        if not ways or not bench.has_time(f"context: {tree or f'K = {K}'}, batch {batch}"):
            continue
        spec = EngineSpec(
            num_speculative_tokens=K,
            tree=tree,
            max_num_seqs=batch,
            max_model_len=max(map(max, ways)) + room,
            max_tokens=-(-max(map(sum, ways)) // batch) + room + BLOCK_SIZE,
        )
        engine = bench.pair.engine(spec)
        for lengths in ways:
            prompts = [turned(bench.pair.prompts, i, length) for i, length in enumerate(lengths)]
            served = serve(engine, prompts, batch, min(options.max_tokens, 64))
            known = plain.setdefault(tuple(lengths), served.token_ids)
            row: Row = {
                "longest_context": max(lengths),
                "shortest_context": min(lengths),
                "num_speculative_tokens": K,
                "rows": 1 + (K if tree is None else tree.num_nodes),
                "batch": batch,
                "mean_acceptance_length": served.stats.mean_acceptance_length,
            }
            difference = first_difference(served.token_ids, known)
            if difference is None:
                yield row | _context_row(bench, engine, K, prompts)
            else:
                yield row | {"refused": difference}
        bench.pair.drop(spec)


def _context_row(bench: Bench, engine: Engine, K: int, prompts: list[list[int]]) -> Row:
    spread = time_rounds(engine, prompts, bench.options.num_rounds)
    phases = time_phases(engine, prompts, bench.options.num_rounds)
    verify = sum(phases[name].median for name in ("forward", "choose"))
    floor = bytes_of(bench.pair).floor_ms(K, bench.bandwidth.reading)
    return _columns(spread) | {"verify_ms": verify, "floor_ms_of_weights": floor}


def cold(bench: Bench) -> list[Row]:
    """From process start to the first token; the first start compiles every kernel.

    Of the largest K, or of as many drafts as pay, as users get it.
    """
    bench.pair.drop()
    target = str(bench.pair.target.report.directory)
    eagle = bench.pair.eagle
    draft = None if eagle is None else str(eagle.report.directory)
    config = bench.pair.config
    engine: dict[str, object] = {
        "device": str(bench.pair.device),
        "dtype": config.dtype,
        "seed": config.seed,
        "enforce_eager": config.enforce_eager,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_model_len": bench.options.max_model_len,
    }
    if bench.options.max_num_seqs is not None:
        engine["max_num_seqs"] = bench.options.max_num_seqs
    K = AUTO if bench.options.adaptive else max(bench.ks)
    return cold_rows(target, draft, K, engine)


SUITES: dict[str, Callable[[Bench], Iterable[Row]]] = {
    suite.__name__: suite
    for suite in (
        *(
            protocol,
            rounds,
            exactness,
            attention,
            k,
            batch,
            context,
            products,
            loop,
            ramp,
            noise,
            costs,
            zero,
            trees,
            stops,
        ),
        *(gaps, requests, waiting, prefill, first_token, capture, padding, memory, cold),
    )
}
