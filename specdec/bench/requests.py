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

from graphs.frozen_heap import frozen_heap
from specdec.bench.bench import Bench
from specdec.bench.loop import Loop, jobs
from specdec.bench.pair import EngineSpec, joined, turned
from specdec.bench.percentiles import percentile
from specdec.bench.profile import profile_serving
from specdec.bench.report import Row
from specdec.bench.serving import Job, generate, greedy
from specdec.engine import Engine
from specdec.requests.request import Request
from specdec.requests.stats import SpeculationStats

NUM_REQUESTS = 256
NUM_ON_CPU = 4
BATCH = 32
LONGEST_PROMPT = 1024
LONGEST_ANSWER = 512
LONG_PROMPTS = ((2048, 6), (16384, 2))  # tokens, and how many arrive
INTERVAL = 1.0  # seconds between two of them


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
    drawn = draw_jobs(pair.prompts, NUM_REQUESTS if pair.device.type == "cuda" else NUM_ON_CPU)
    batch = bench.options.max_num_seqs or BATCH
    for drafting in bench.drafting:
        K = drafting.num_tokens
        if not bench.has_time(f"requests: K = {drafting.name}"):
            continue
        spec = EngineSpec(
            num_speculative_tokens=K,
            is_adaptive=drafting.is_adaptive,
            tree=drafting.tree,
            max_num_seqs=batch,
            max_tokens=LONGEST_PROMPT + LONGEST_ANSWER + 2 * K,
            max_model_len=LONGEST_PROMPT + LONGEST_ANSWER + 1,
            has_prefill_graphs=True,
        )
        engine = pair.engine(spec)
        generate(engine, drawn[:batch])  # warm-up
        batches = [drawn[i : i + batch] for i in range(0, len(drawn), batch)]
        at_once, continuously = _serve(engine, [drawn])
        in_batches, one_by_one = _serve(engine, batches)
        is_same = [r.token_ids for r in at_once] == [r.token_ids for r in in_batches]
        base: Row = {
            "num_speculative_tokens": drafting.name,
            "requests": len(drawn),
            "max_num_seqs": batch,
            "same_tokens": is_same,
        }
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
        prompt = turned(prompts, i, draw(160, 1.0, 8, LONGEST_PROMPT))
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
    """Gaps between tokens in a loop by itself, and while long prompts arrive beside it."""
    K = max(bench.ks)
    longest = bench.pair.target.config.max_position_embeddings
    for batch, (length, count) in itertools.product(bench.options.batches, LONG_PROMPTS):
        what = f"waiting: batch {batch}, prompts of {length}"
        if length + 1 > longest:
            bench.skipped.append(f"{what}: longer than the target's {longest}")
        elif bench.has_time(what):
            spec = EngineSpec(
                num_speculative_tokens=K,
                max_num_seqs=batch + count,
                max_tokens=length + 1,
                max_model_len=length + 1,
                has_prefill_graphs=True,
            )
            engine = bench.pair.engine(spec)
            prompt = joined(bench.pair.prompts, length)
            alone = _gaps(Loop(engine, jobs(bench, batch, 0.0)), batch, [])
            long = greedy([prompt], 1) * count
            beside = _gaps(Loop(engine, jobs(bench, batch, 0.0)), batch, long)
            bench.pair.drop(spec)
            yield {"num_speculative_tokens": K, "batch": batch, "prompt_tokens": length} | {
                "prompts": count,
                "gap_ms_p50": percentile(alone, 50),
                "gap_ms_p99": percentile(alone, 99),
                "with_prompts_p50": percentile(beside, 50),
                "with_prompts_p99": percentile(beside, 99),
                "p99_over_p50": _over(percentile(beside, 99), percentile(alone, 50)),
            }


def _gaps(loop: Loop, batch: int, long: Sequence[Job]) -> list[float]:
    """Seconds between deliveries in a loop in its window, in which a prompt comes each INTERVAL."""
    with frozen_heap():  # as in the suite loop
        loop.run(batch, batch)
        del loop.gaps[:]
        began = time.monotonic()
        num_arrived = 0
        while time.monotonic() - began < max(len(long), 3) * INTERVAL or len(loop.gaps) < 2:
            if num_arrived < len(long) and time.monotonic() - began >= num_arrived * INTERVAL:
                loop.add(long[num_arrived])
                num_arrived += 1
            loop.run(batch, 1)
    loop.end()
    return loop.gaps.tolist()


def _over(value: float | None, usual: float | None) -> float | None:
    return None if value is None or usual is None else value / usual
