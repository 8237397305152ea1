"""What `specdec bench` can measure: each suite is a function from a Bench to rows of a table."""

from collections.abc import Callable, Iterable, Iterator
from itertools import product

from specdec.bench.attention import attention
from specdec.bench.bench import MOST_CONTEXT, Bench
from specdec.bench.capture import capture, memory
from specdec.bench.card import bytes_of
from specdec.bench.cold import cold_rows
from specdec.bench.exactness import exchanges
from specdec.bench.first_token import first_token
from specdec.bench.loop import loop
from specdec.bench.noise import noise
from specdec.bench.pair import EngineSpec, turned
from specdec.bench.products import products
from specdec.bench.report import Row
from specdec.bench.requests import requests
from specdec.bench.rounds import time_phases, time_rounds, tokens_needed
from specdec.bench.serving import first_difference, serve
from specdec.bench.timing import Spread
from specdec.bench.trees import trees
from specdec.engine import Engine
from specdec.sizes import BLOCK_SIZE, TreeShape
from specdec.speculative_config import AUTO
from specdec.step import PHASES


def protocol(bench: Bench) -> Iterator[Row]:
    """Measure tokens per second for every K at every batch."""
    for K, batch in product(bench.ks, bench.options.batches):
        if bench.has_time(f"K = {K}, batch {batch}"):
            yield bench.run(K, batch)


def rounds(bench: Bench) -> Iterator[Row]:
    """Time rounds in steady state and their phases on the device, beside the floor."""
    num_rounds = bench.options.num_rounds
    for K, batch in product(bench.ks, bench.options.batches):
        if "refused" in bench.runs.get((K, batch), {}):
            yield bench.runs[K, batch]
        elif bench.has_time(f"rounds: K = {K}, batch {batch}"):
            prompts = bench.prompts(batch)[:batch]
            phases = time_phases(bench.engine(K, batch), prompts, num_rounds)
            medians = {name: phases[name].median if name in phases else None for name in PHASES}
            yield _round_row(bench, K, batch) | medians


def _round_row(bench: Bench, K: int, batch: int) -> Row:
    """Time a round by the device's clock, beside the floor of its bytes."""
    prompts = bench.prompts(batch)[:batch]
    spread = time_rounds(bench.engine(K, batch), prompts, bench.options.num_rounds)
    floor = bytes_of(bench.pair).floor_ms(K, bench.bandwidth.reading)
    row: Row = {"num_speculative_tokens": K, "batch": batch}
    return row | _columns(spread) | {"floor_ms": floor, "of_floor": floor / spread.median}


def _columns(spread: Spread) -> Row:
    """Give the mean too, since rounds of a tree differ by where its paths begin."""
    return {
        "device_round_ms": spread.median,
        "low": spread.low,
        "high": spread.high,
        "mean_round_ms": spread.mean,
    }


def context(bench: Bench) -> Iterator[Row]:
    """Time rounds after long prompts, the pair's prompts joined; outputs are compared too.

    All requests are equally long, then one is as long as the longest among the shortest. --trees
    adds rounds of these, greedy and full. verify_ms: the target's pass and its choice.
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


def exactness(bench: Bench) -> Iterator[Row]:
    """Price the promise that rows do not depend on their neighbours.

    Whole rounds and chunks with cuBLAS's products and others' attention, on a GPU; then one layer's
    attention beside the fastest that can be installed.
    """
    yield from exchanges(bench)
    yield from attention(bench)


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


def starts(bench: Bench) -> list[Row]:
    """Start two fresh processes."""
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
        *(protocol, rounds, exactness, context, products, loop, noise, trees, requests),
        *(first_token, cold),
    )
}
