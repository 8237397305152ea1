"""What exactness costs: the shipped round or chunk against the fastest one, exact or not.

The others take products from cuBLAS, attention from the yardsticks, or both, inside the same engine
(exchanges.py): whole captured rounds of requests that all have one length of context, and whole
eager chunks, nothing composed from parts. Whatever the tokens are then, their number is the same.
The yardstick is the fastest of those in which something is exchanged, so never the shipped one, and
its price may be negative.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from specdec.bench.bench import MOST_CONTEXT, Bench
from specdec.bench.exchanges import Job, backend_of
from specdec.bench.pair import EngineSpec, Pair, joined
from specdec.bench.report import Row
from specdec.bench.timing import Clock, time_rounds, tokens_needed
from specdec.bench.yardsticks import first_line, yardsticks
from specdec.kernels.backend import using
from specdec.scheduling.work import PromptPart
from specdec.sizes import BLOCK_SIZE
from specdec.start.speculation import Drafting

Names = tuple[str, ...]  # what is exchanged
SHIPPED: Names = ()
OF_ROUNDS: Sequence[Names] = (("layers",), ("heads",), ("layers", "heads"))
OF_CHUNKS: Sequence[Names] = (("layers",),)
PROMPTS = (2048, 8192)


def exactness(bench: Bench) -> Iterator[Row]:
    """Price the promise that rows do not depend on their neighbours, on a GPU only.

    Whole rounds and chunks are timed with cuBLAS's products and with others' attention.
    """
    if bench.pair.device.type != "cuda":
        return
    bench.pair.drop()
    options = bench.options
    for K, batch, context in product(bench.ks, bench.batches, bench.contexts):
        what = f"exactness: K = {K}, batch {batch}, context {context}"
        room = tokens_needed(options.num_rounds, K)
        if _is_possible(bench, what, [context] * batch, room):
            yield from of_rounds(bench, K, batch, context)
    for length in PROMPTS:
        if _is_possible(bench, f"exactness: prompt of {length} tokens", [length], 1):
            yield from of_chunks(bench, max(bench.ks), length)


def _is_possible(bench: Bench, what: str, lengths: Sequence[int], room: int) -> bool:
    """Say whether it can be measured, and note it if not.

    lengths: tokens of each prompt; room: tokens after each
    """
    longest = bench.pair.target.config.max_position_embeddings - room
    if max(lengths) > longest:
        bench.skipped.append(f"{what}: the target has room for {longest} tokens")
        return False
    if sum(lengths) > MOST_CONTEXT:
        bench.skipped.append(f"{what}: more than {MOST_CONTEXT} tokens")
        return False
    return bench.has_time(what)


def of_rounds(bench: Bench, K: int, batch: int, context: int) -> list[Row]:
    """Time captured rounds of requests after so many tokens of context."""
    options = bench.options
    pair = bench.pair
    room = tokens_needed(options.num_rounds, K)
    prompts = [joined(pair.prompts, context, i) for i in range(batch)]
    spec = EngineSpec(
        drafting=Drafting(K),
        max_num_seqs=batch,
        max_tokens=context + room,
        max_model_len=max(options.model_len, context + room),
        request_sizes=(batch,),
    )

    def time() -> float:
        try:
            return time_rounds(pair.engine(spec), prompts, options.num_rounds).median
        finally:
            pair.drop()

    times = timings(time, pair, Job(batch=batch, rows=K + 1, context=context), OF_ROUNDS)
    columns: Row = {"num_speculative_tokens": K, "batch": batch, "context": context}
    return priced(columns, "device_round_ms", times)


def of_chunks(bench: Bench, K: int, length: int) -> list[Row]:
    """Time eager chunks, each a whole prompt."""
    pair = bench.pair
    job = Job(batch=1, rows=length, context=length)
    times = timings(lambda: chunk_ms(pair, K, length), pair, job, OF_CHUNKS)
    pair.drop()
    columns: Row = {"num_speculative_tokens": K, "batch": 1, "prompt_tokens": length}
    return priced(columns, "chunk_ms", times)


def chunk_ms(pair: Pair, K: int, length: int) -> float:
    """Time a whole prompt in one chunk op by op, with the draft's part of it; the median."""
    drafting, room = Drafting(K), length + 64
    spec = EngineSpec(drafting=drafting, max_num_seqs=1, max_model_len=room, enforce_eager=True)
    engine = pair.engine(spec)
    prompt = joined(pair.prompts, length)
    blocks = list(range(-(-length // BLOCK_SIZE)))
    part = PromptPart(state_row=-1, prompt=prompt, start=0, length=length, blocks=blocks)
    return Clock(pair.device).repeat(lambda: engine.runner.run_step(parts=[part]), 6, 2).median


def timings(
    time: Callable[[], float], pair: Pair, job: Job, products: Sequence[Names]
) -> dict[Names, float | str]:
    """Time the shipped one, each exchange, and the best of both kinds together, in milliseconds.

    A text in place of milliseconds says why an attention is not possible.
    """
    times: dict[Names, float | str] = {}
    attentions = [(name,) for name in yardsticks(pair.device)]

    def add(names: Names, may_fail: bool = True) -> None:
        try:
            with using(backend_of(names, job, pair.device)):
                times[names] = time()
        except (RuntimeError, ValueError) as error:  # in the row, beside the others' times
            if not may_fail:
                raise
            times[names] = first_line(error)

    for names in (SHIPPED, *products):
        add(names, may_fail=False)
    for names in attentions:
        add(names)
    best_products, best_attention = _fastest(times, products), _fastest(times, attentions)
    if best_products and best_attention:
        add((*best_products, *best_attention))
    return times


def priced(columns: Row, unit: str, times: Mapping[Names, float | str]) -> list[Row]:
    """Make a row for each, with the price of the shipped one against it."""
    shipped = times[SHIPPED]
    assert isinstance(shipped, float), shipped
    yardstick = _fastest(times, [names for names in times if names != SHIPPED])
    rows = []
    for names, found in times.items():
        time, error = (found, None) if isinstance(found, float) else (None, found)
        rows.append(
            {
                **columns,
                "exchanged": " + ".join(names) or "nothing (shipped)",
                unit: time,
                "price": None if time is None else shipped / time - 1,
                "is_yardstick": names == yardstick,
                "error": error,
            }
        )
    return rows


def _fastest(times: Mapping[Names, float | str], among: Sequence[Names]) -> Names | None:
    """Choose the fastest that is possible; None if none is."""
    found = {names: time for names in among if isinstance(time := times[names], float)}
    return min(found, key=found.__getitem__, default=None)
