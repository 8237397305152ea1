"""What `specdec bench` can measure: a suite is a function from a Bench to rows of a table. SUITES names them."""

from collections.abc import Callable, Sequence

from specdec.bench.bench import Bench, Row, refused
from specdec.bench.capture import batch_rows, capture_rows, memory_rows
from specdec.bench.card import bytes_of
from specdec.bench.cold import cold_rows
from specdec.bench.exactness import exactness_rows
from specdec.bench.pair import EngineSpec, joined
from specdec.bench.prefill import prefill_rows
from specdec.bench.products import product_rows
from specdec.bench.requests import gap_rows, request_rows, waiting_rows
from specdec.bench.rounds import WARMUP, time_phases, time_rounds, tokens_needed
from specdec.bench.serving import Served, first_difference, serve
from specdec.bench.timing import Spread
from specdec.step import PHASES


def protocol(bench: Bench) -> list[Row]:
    """Tokens per second for every K at every batch."""
    return _runs(bench, [(K, batch) for K in bench.ks for batch in bench.options.batches])


def batch_scaling(bench: Bench) -> list[Row]:
    """The same at batches 1 to the largest one asked for, in powers of two."""
    largest = max(bench.options.batches)
    sizes = sorted({*bench.options.batches, *(1 << i for i in range(largest.bit_length()))})
    return _runs(bench, [(K, batch) for K in bench.ks for batch in sizes])


def k_scaling(bench: Bench) -> list[Row]:
    """Served and timed rounds at batch 1 for K = 0 to 8, beside the floor."""
    rows = []
    for K in range(9 if bench.pair.eagle is not None else 1):
        if bench.has_time(f"k: K = {K}"):
            row = bench.run(K, 1)
            rows.append(row if "refused" in row else row | round_row(bench, K, 1))
    return rows


def _runs(bench: Bench, points: Sequence[tuple[int, int]]) -> list[Row]:
    return [bench.run(K, batch) for K, batch in points if bench.has_time(f"K = {K}, batch {batch}")]


def rounds(bench: Bench) -> list[Row]:
    """Where a round's time goes on the device, in steady state, beside the floor."""
    rows = []
    for K in bench.ks:
        for batch in bench.options.batches:
            if "refused" in bench.runs.get((K, batch), {}):
                rows.append(bench.runs[K, batch])
            elif bench.has_time(f"rounds: K = {K}, batch {batch}"):
                phases = time_phases(
                    bench.engine(K, batch), bench.prompts(batch)[:batch], bench.options.num_rounds
                )
                rows.append(
                    round_row(bench, K, batch)
                    | {name: _median(phases.get(name)) for name in PHASES}
                )
    return rows


def round_row(bench: Bench, K: int, batch: int) -> Row:
    """A round by the device's clock: median, the middle 80 %, and the floor of its bytes."""
    spread = time_rounds(
        bench.engine(K, batch), bench.prompts(batch)[:batch], bench.options.num_rounds
    )
    floor = bytes_of(bench.pair).floor_ms(K, bench.bandwidth.reading)
    return {
        "num_speculative_tokens": K,
        "batch": batch,
        "device_round_ms": spread.median,
        "low": spread.low,
        "high": spread.high,
        "floor_ms": floor,
        "of_floor": floor / spread.median,
    }


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def context_scaling(bench: Bench) -> list[Row]:
    """Rounds behind long prompts at batch 1, the bundled prompts joined; their outputs compared as ever."""
    rows: list[Row] = []
    options, pair = bench.options, bench.pair
    room = max(tokens_needed(options.num_rounds + WARMUP, max(bench.ks)), options.max_tokens)
    lengths = [
        n for n in options.contexts if n + room <= pair.target.config.max_position_embeddings
    ]
    plain: dict[int, Served] = {}
    for K in bench.ks:
        if not lengths or not bench.has_time(f"context: K = {K}"):
            continue
        spec = EngineSpec(
            num_speculative_tokens=K,
            max_num_seqs=1,
            max_tokens=lengths[-1] + room,
            max_model_len=lengths[-1] + room,
        )
        engine = pair.engine(spec)
        for length in lengths:
            prompt = joined(pair.prompts, length)
            run = serve(engine, [prompt], 1, min(options.max_tokens, 64))
            difference = first_difference(run.token_ids, plain.setdefault(length, run).token_ids)
            if difference is not None:
                rows.append({"context": length} | refused(K, 1, difference))
                continue
            spread = time_rounds(engine, [prompt], options.num_rounds)
            timed: Row = {"device_round_ms": spread.median, "low": spread.low, "high": spread.high}
            floor = bytes_of(pair).floor_ms(K, bench.bandwidth.reading)
            rows.append(
                {"context": length, "num_speculative_tokens": K}
                | timed
                | {"floor_ms_of_weights": floor}
            )
        pair.drop(spec)
    return rows


def exactness(bench: Bench) -> list[Row]:
    """What it costs that rows do not depend on their neighbours."""
    pair, options = bench.pair, bench.options
    rows: list[Row] = []
    for K in bench.ks:
        rows += exactness_rows(
            pair, K, options.batches, options.num_rounds, options.max_model_len, bench.has_time
        )
    return rows


def products(bench: Bench) -> list[Row]:
    """Every weight's product at few rows, ours and cuBLAS's, as a share of the measured bandwidth."""
    return product_rows(bench.pair, bench.bandwidth.reading, bench.has_time)


def capture(bench: Bench) -> list[Row]:
    """Seconds and memory of each family's graphs."""
    largest = max(64, *bench.options.batches)
    return capture_rows(bench.pair, max(bench.ks), largest, bench.options.max_model_len)


def padding(bench: Bench) -> list[Row]:
    """Which graphs serve the prompts at the largest K, and how many rows they compute for nothing."""
    K, rows = max(bench.ks), list[Row]()
    for batch in bench.options.batches:
        if bench.has_time(f"padding: batch {batch}"):
            served = batch_rows(
                bench.engine(K, batch), bench.prompts(batch)[:batch], bench.options.max_tokens
            )
            rows += [{"num_speculative_tokens": K, "batch": batch} | row for row in served]
    return rows


def memory(bench: Bench) -> list[Row]:
    """Memory behind a first batch, along many rounds, and when the graphs are gone."""
    engine = bench.engine(max(bench.ks), max(bench.options.batches))
    rows = memory_rows(
        engine, bench.prompts(8)[:8], bench.options.max_tokens, bench.options.rounds_of_memory
    )
    bench.pair.drop()
    return rows


def cold(bench: Bench) -> list[Row]:
    """From the start of a process to its first token; the first start compiles every kernel, the second finds them."""
    bench.pair.drop()
    draft = None if bench.pair.eagle is None else str(bench.pair.eagle.report.directory)
    return cold_rows(
        str(bench.pair.target.report.directory), draft, max(bench.ks), bench.pair.device
    )


def gaps(bench: Bench) -> list[Row]:
    """While the engine serves, the part of the time in which the device runs nothing (torch.profiler)."""
    return gap_rows(bench)


def requests(bench: Bench) -> list[Row]:
    """256 requests (4 on a CPU) of mixed lengths, all at once, against running them one batch at a time."""
    return request_rows(bench)


def waiting(bench: Bench) -> list[Row]:
    """How long a request that runs waits for its next tokens while a prompt of 16,384 tokens is prefilled."""
    return waiting_rows(bench)


def prefill(bench: Bench) -> list[Row]:
    """A prompt chunk, and what it costs that its rows are those of decoding: cuBLAS and torch's attention instead."""
    return prefill_rows(bench)


SUITES: dict[str, Callable[[Bench], list[Row]]] = {
    "protocol": protocol,
    "rounds": rounds,
    "exactness": exactness,
    "k": k_scaling,
    "batch": batch_scaling,
    "context": context_scaling,
    "products": products,
    "gaps": gaps,
    "requests": requests,
    "waiting": waiting,
    "prefill": prefill,
    "capture": capture,
    "padding": padding,
    "memory": memory,
    "cold": cold,
}
