"""Prompts: how long they take, in one eager chunk, many at once, and up to the first token."""

import time
from collections.abc import Iterator

from specdec.bench.bench import Bench
from specdec.bench.pair import EngineSpec, Pair, joined, turned
from specdec.bench.report import Row
from specdec.bench.serving import generate, greedy
from specdec.bench.timing import Clock, Spread
from specdec.scheduling.work import PromptPart
from specdec.sizes import BLOCK_SIZE

LENGTHS = (512, 2048, 8192)
FIRST_TOKEN_LENGTHS = (64, 128, 256, 512, 1024, 2048, 8192, 16384)
MANY_PROMPTS = 32, 4096  # at once, of so many tokens
NUM_FIRST_TOKENS = 12  # requests of each length, of which the first two do not count


def prefill(bench: Bench) -> Iterator[Row]:
    """One prompt in one eager chunk, and many that arrive together. On a GPU only."""
    limit = bench.pair.target.config.max_position_embeddings
    for length in LENGTHS if bench.pair.device.type == "cuda" else ():
        if length < limit and bench.has_time(f"prefill: {length} tokens"):
            yield prefill_row(bench.pair, max(bench.ks), length)
    count, length = MANY_PROMPTS
    if bench.pair.device.type == "cuda" and length < limit and bench.has_time("prefill: many"):
        yield many_prompts(bench.pair, max(bench.ks), count, length)


def first_token(bench: Bench) -> Iterator[Row]:
    """Milliseconds to the first token of one request, by graphs in pieces and op by op."""
    K = max(bench.ks)
    limit = bench.pair.target.config.max_position_embeddings
    lengths = [length for length in FIRST_TOKEN_LENGTHS if length < limit]
    few = [length for length in lengths if length <= 2048]
    for how, is_eager, these in (("graphs", False, lengths), ("op by op", True, few)):
        if not these or not bench.has_time(f"first_token: {how}"):
            continue
        spec = EngineSpec(
            num_speculative_tokens=K,
            max_num_seqs=1,
            max_model_len=these[-1] + 1,
            has_prefill_graphs=True,
            enforce_eager=is_eager,
        )
        engine = bench.pair.engine(spec)
        for length in these:
            jobs = greedy([joined(bench.pair.prompts, length)], 1)
            runs = [generate(engine, jobs) for _ in range(NUM_FIRST_TOKENS)]
            seconds = [each.stats.time_to_first_token or 0.0 for [each] in runs[2:]]
            mode = engine.runner.graphs.dispatch_ragged(1, length, 1).target.mode.name
            spread = Spread.of([1e3 * each for each in seconds])
            figures = {"ms": spread.median, "low": spread.low, "high": spread.high}
            yield {"prompt_tokens": length, "asked": how, "runs_as": mode} | figures
        bench.pair.drop(spec)


def many_prompts(pair: Pair, K: int, count: int, length: int) -> Row:
    """Seconds until so many prompts, which arrive together, have a token each."""
    spec = EngineSpec(
        num_speculative_tokens=K,
        max_num_seqs=count,
        max_model_len=length + K + 1,
        has_prefill_graphs=True,
    )
    engine = pair.engine(spec)
    seconds = []
    for run in range(3):
        prompts = [turned(pair.prompts, run * count + i, length) for i in range(count)]
        began = time.monotonic()
        generate(engine, greedy(prompts, 1))
        seconds.append(time.monotonic() - began)
    pair.drop(spec)
    return {"prompts": count, "prompt_tokens": length, "seconds": Spread.of(seconds).median}


def prefill_row(pair: Pair, K: int, length: int) -> Row:
    """One prompt of this length."""
    spec = chunk_spec(K, length)
    milliseconds = chunk_ms(pair, spec, length)
    pair.drop(spec)
    return {
        "prompt_tokens": length,
        "chunk_ms": milliseconds,
        "prompt_tokens_per_second": 1e3 * length / milliseconds,
    }


def chunk_spec(K: int, length: int) -> EngineSpec:
    """An engine that computes a prompt of this length op by op."""
    return EngineSpec(
        num_speculative_tokens=K, max_num_seqs=1, max_model_len=length + 64, enforce_eager=True
    )


def chunk_ms(pair: Pair, spec: EngineSpec, length: int) -> float:
    """The median of a whole prompt in one chunk, with the draft's part of it."""
    engine = pair.engine(spec)
    prompt = joined(pair.prompts, length)
    blocks = list(range(-(-length // BLOCK_SIZE)))
    part = PromptPart(state_row=-1, prompt=prompt, start=0, length=length, blocks=blocks)
    return Clock(pair.device).repeat(lambda: engine.runner.run_step(parts=[part]), 6, 2).median
