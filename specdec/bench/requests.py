"""Many requests: throughput against batches one after another, idle time, and long prompts.

Lengths resemble ShareGPT's: prompts log-normal around 160 tokens (sigma 1, 8 to 1,024), answers
around 128 (sigma 0.9, 4 to 512), drawn with seed 0; the texts are the pair's prompts joined. The
outputs of both ways to serve are compared.
"""

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence

from specdec.bench.bench import Bench
from specdec.bench.pair import EngineSpec, joined
from specdec.bench.profile import profile_serving
from specdec.bench.report import Row
from specdec.bench.serving import Job, generate, greedy
from specdec.bench.timing import Clock, wrapped
from specdec.engine import Engine
from specdec.requests.request import Request
from specdec.requests.stats import SpeculationStats

NUM_REQUESTS = 256
NUM_ON_CPU = 4
BATCH = 32
LONGEST_PROMPT = 1024
LONGEST_ANSWER = 512
LONG_PROMPT = 16384
NUM_WAITING = 4


def gaps(bench: Bench) -> Iterator[Row]:
    """While the engine serves at the largest K, how long the device is idle (torch.profiler)."""
    K = max(bench.ks)
    for batch in bench.options.batches:
        if bench.has_time(f"gaps: batch {batch}"):
            engine = bench.engine(K, batch)
            prompts = bench.prompts(batch)[:batch]
            found = profile_serving(engine, prompts, bench.options.num_rounds // 3)
            yield {
                "num_speculative_tokens": K,
                "batch": batch,
                "round_ms": found.span_us / 1e3,
                "busy_ms": found.busy_us / 1e3,
                "gap_share": found.gap_share,
            }


def requests(bench: Bench) -> Iterator[Row]:
    """256 requests (4 on a CPU) of mixed lengths: all at once, and one batch at a time."""
    pair = bench.pair
    jobs = draw_jobs(pair.prompts, NUM_REQUESTS if pair.device.type == "cuda" else NUM_ON_CPU)
    for K in bench.ks:
        if not bench.has_time(f"requests: K = {K}"):
            continue
        spec = EngineSpec(
            num_speculative_tokens=K,
            max_num_seqs=BATCH,
            max_tokens=LONGEST_PROMPT + LONGEST_ANSWER + 2 * K,
            max_model_len=LONGEST_PROMPT + LONGEST_ANSWER + 1,
            has_prefill_graphs=True,
        )
        engine = pair.engine(spec)
        generate(engine, jobs[:BATCH])  # warm-up
        batches = [jobs[i : i + BATCH] for i in range(0, len(jobs), BATCH)]
        at_once, continuously = _serve(engine, [jobs])
        in_batches, one_by_one = _serve(engine, batches)
        is_same = [r.token_ids for r in at_once] == [r.token_ids for r in in_batches]
        base: Row = {"num_speculative_tokens": K, "requests": len(jobs), "same_tokens": is_same}
        yield base | {"served": "one batch at a time"} | one_by_one
        yield base | {"served": "continuously"} | continuously
        pair.drop(spec)


def draw_jobs(prompts: Sequence[Sequence[int]], count: int) -> list[Job]:
    """Lengths from the stated distribution; texts start with different prompts of the pair."""
    chance = random.Random(0)

    def draw(median: int, sigma: float, least: int, most: int) -> int:
        return min(max(round(chance.lognormvariate(math.log(median), sigma)), least), most)

    jobs: list[Job] = []
    for i in range(count):
        turned = [*prompts[i % len(prompts) :], *prompts[: i % len(prompts)]]
        prompt = joined(turned, draw(160, 1.0, 8, LONGEST_PROMPT))
        jobs += greedy([prompt], draw(128, 0.9, 4, LONGEST_ANSWER))
    return jobs


def _serve(engine: Engine, batches: Sequence[Sequence[Job]]) -> tuple[list[Request], Row]:
    """The finished requests of all batches, one batch after another, and their figures."""
    began = time.monotonic()
    served = [request for batch in batches for request in generate(engine, batch)]
    seconds = time.monotonic() - began
    stats = [request.stats for request in served]
    return served, {
        "seconds": seconds,
        "tokens_per_second": sum(each.num_generated_tokens for each in stats) / seconds,
        "prompt_tokens_per_second": sum(each.num_prompt_tokens for each in stats) / seconds,
        "mean_acceptance_length": SpeculationStats.merged(stats).mean_acceptance_length,
        "preemptions": sum(each.num_preemptions for each in stats),
    }


def waiting(bench: Bench) -> Iterator[Row]:
    """How long running requests wait for tokens while a prompt of 16,384 tokens is prefilled."""
    K = max(bench.ks)
    pair = bench.pair
    if pair.target.config.max_position_embeddings < LONG_PROMPT + 64:
        return
    spec = EngineSpec(
        num_speculative_tokens=K, max_num_seqs=NUM_WAITING + 1, max_model_len=LONG_PROMPT + 64
    )
    engine = pair.engine(spec)
    long = greedy([joined(pair.prompts, LONG_PROMPT)], 2)
    generate(engine, long)  # warm-up
    steps = _steps_around(engine, pair.prompts[:NUM_WAITING], long)
    pair.drop(spec)
    chunks = [milliseconds for kind, milliseconds in steps if kind == "run_chunk"]
    rounds = [milliseconds for kind, milliseconds in steps if kind == "run_round"]
    # a running request waits from the end of one round to the end of the next
    ends = [i + 1 for i, (kind, _) in enumerate(steps) if kind == "run_round"]
    longest = max(sum(ms for _, ms in steps[i:j]) for i, j in itertools.pairwise(ends))
    yield {
        "num_speculative_tokens": K,
        "prompt_tokens": LONG_PROMPT,
        "chunks": len(chunks),
        "longest_chunk_ms": max(chunks),
        "longest_round_ms": max(rounds),
        "longest_wait_ms": longest,
        "is_within_a_chunk_and_a_round": longest <= max(chunks) + max(rounds),
    }


def _steps_around(
    engine: Engine, prompts: Sequence[Sequence[int]], long: Sequence[Job]
) -> list[tuple[str, float]]:
    """Kind and milliseconds of each step from the arrival of the long prompt to its end."""
    engine.add_requests(greedy(prompts, 60))
    for _ in range(6):
        engine.step()
    clock = Clock(engine.runner.device)
    with wrapped(engine.runner, ("run_chunk", "run_round"), clock.around):
        [request] = engine.add_requests(long)
        while request.finish is None:
            engine.step()
    engine.abort_all()
    engine.drain()
    return clock.spans()
