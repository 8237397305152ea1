"""What a step costs by its rows and its contexts: full graphs, pieces, and launches op by op."""

from collections.abc import Iterator
from functools import partial

from graphs.modes import CUDAGraphMode
from specdec.bench.bench import Bench
from specdec.bench.pair import EngineSpec, joined
from specdec.bench.report import Row
from specdec.bench.rounds import WARMUP, steady, tokens_needed
from specdec.bench.timing import Clock, Spread
from specdec.engine import Engine
from specdec.requests.sampling_flags import GREEDY
from specdec.scheduling.work import PromptPart
from specdec.sizes import BLOCK_SIZE

KINDS = {
    CUDAGraphMode.FULL: "full graph",
    CUDAGraphMode.PIECEWISE: "pieces",
    CUDAGraphMode.NONE: "op by op",
}
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PROMPT = 100  # context of the rounds that vary rows


def costs(bench: Bench) -> Iterator[Row]:
    """Milliseconds of a step on the device: rounds by requests and context, chunks by rows."""
    options = bench.options
    K = max(bench.ks)
    for batch in options.batches:
        yield from _rounds(bench, K, batch, PROMPT)
    for length in options.contexts:
        for batch in (1, 8):
            yield from _rounds(bench, K, batch, length)
    yield from _chunks(bench, K)
    bench.pair.drop()


def _rounds(bench: Bench, K: int, batch: int, context: int) -> Iterator[Row]:
    """With drafts and without, in one engine."""
    num_rounds = bench.options.num_rounds
    room = 2 * tokens_needed(num_rounds, K)
    longest = bench.pair.target.config.max_position_embeddings
    what = f"costs: batch {batch}, context {context}"
    if context + room > longest:
        bench.skipped.append(f"{what}: longer than the target's {longest}")
        return
    if not bench.has_time(what):
        return
    spec = EngineSpec(
        num_speculative_tokens=K,
        max_num_seqs=batch,
        max_tokens=context + room,
        max_model_len=max(bench.options.model_len, context + room),
        request_sizes=(batch,),
    )
    engine = bench.pair.engine(spec)
    prompts = [joined(bench.pair.prompts, context)] * batch
    for query_len in {1, K + 1}:
        with steady(engine, prompts, num_rounds) as rounds:
            clock = Clock(engine.runner.device)
            spread = clock.repeat(partial(rounds.run, query_len), num_rounds, WARMUP)
        how = engine.runner.graphs.dispatch_round(batch, query_len=query_len).target.mode
        yield _row(how, batch * query_len, batch, context, spread)
    bench.pair.drop(spec)


def _chunks(bench: Bench, K: int) -> Iterator[Row]:
    """One prompt from its beginning, by the graphs that users get."""
    length = min(CHUNKS[-1], bench.pair.target.config.max_position_embeddings - 1)
    spec = EngineSpec(
        num_speculative_tokens=K,
        max_num_seqs=1,
        max_model_len=length + 1,
        has_prefill_graphs=True,
    )
    for rows in (rows for rows in CHUNKS if rows <= length):
        if bench.has_time(f"costs: chunk of {rows}"):
            yield _chunk_row(bench.pair.engine(spec), bench.pair.prompts, rows)


def _chunk_row(engine: Engine, prompts: list[list[int]], rows: int) -> Row:
    runner = engine.runner
    blocks = list(range(-(-rows // BLOCK_SIZE)))
    prompt = joined(prompts, rows)
    part = PromptPart(state_row=-1, prompt=prompt, start=0, length=rows, blocks=blocks)
    how = runner.step_of((), [part], 0, GREEDY, None).passes.target.mode
    spread = Clock(runner.device).repeat(lambda: runner.run_step(parts=[part]), 10, 3)
    return _row(how, rows, 1, 0, spread)


def _row(how: CUDAGraphMode, rows: int, requests: int, context: int, spread: Spread) -> Row:
    return {
        "step": "round" if context else "chunk",
        "runs_as": KINDS[how],
        "rows": rows,
        "requests": requests,
        "context": context,
        "ms": spread.median,
        "low": spread.low,
        "high": spread.high,
        "us_per_row": 1e3 * spread.median / rows,
    }
