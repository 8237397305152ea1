"""How many tokens a second many requests get at once, and in batches one after another.

Lengths resemble ShareGPT's: prompts log-normal around 160 tokens (sigma 1, 8 to 1,024), answers
around 128 (sigma 0.9, 4 to 512), drawn with seed 0; the texts are the pair's prompts joined. The
outputs of both ways to serve are compared.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence

from specdec.bench.bench import Bench
from specdec.bench.pair import EngineSpec, joined
from specdec.bench.report import Row
from specdec.bench.serving import Job, generate, greedy
from specdec.engine import Engine
from specdec.requests.stats import SpeculationStats

NUM_REQUESTS = 256
NUM_ON_CPU = 4
BATCH = 32
LONGEST_PROMPT = 1024
LONGEST_ANSWER = 512
Outputs = list[list[int]]  # token ids


def requests(bench: Bench) -> Iterator[Row]:
    """Serve 256 requests (4 on a CPU) of mixed lengths at once, then one batch at a time."""
    pair = bench.pair
    drawn = draw_jobs(pair.prompts, NUM_REQUESTS if pair.device.type == "cuda" else NUM_ON_CPU)
    batches = [drawn[i : i + BATCH] for i in range(0, len(drawn), BATCH)]
    for drafting in bench.drafting:
        if not bench.has_time(f"requests: K = {drafting.name}"):
            continue
        spec = EngineSpec(
            drafting=drafting,
            max_num_seqs=BATCH,
            max_tokens=LONGEST_PROMPT + LONGEST_ANSWER + 2 * drafting.num_tokens,
            max_model_len=LONGEST_PROMPT + LONGEST_ANSWER + 1,
            has_prefill_graphs=True,
        )
        engine = pair.engine(spec)
        generate(engine, drawn[:BATCH])  # warm-up
        at_once, continuously = _serve(engine, [drawn])
        in_batches, one_by_one = _serve(engine, batches)
        row: Row = {"num_speculative_tokens": drafting.name, "requests": len(drawn)}
        row |= {"max_num_seqs": BATCH, "same_tokens": at_once == in_batches}
        yield row | {"served": "one batch at a time"} | one_by_one
        yield row | {"served": "continuously"} | continuously
        pair.drop(spec)


def draw_jobs(prompts: Sequence[Sequence[int]], count: int) -> list[Job]:
    """Draw lengths from the stated distribution; texts start with different prompts of the pair."""
    chance = random.Random(0)

    def draw(median: int, sigma: float, least: int, most: int) -> int:
        return min(max(round(chance.lognormvariate(math.log(median), sigma)), least), most)

    jobs: list[Job] = []
    for i in range(count):
        prompt = joined(prompts, draw(160, 1.0, 8, LONGEST_PROMPT), i)
        jobs += greedy([prompt], draw(128, 0.9, 4, LONGEST_ANSWER))
    return jobs


def _serve(engine: Engine, batches: Sequence[Sequence[Job]]) -> tuple[Outputs, Row]:
    """Run one batch after another; return their outputs and figures."""
    began = time.monotonic()
    served = [request for batch in batches for request in generate(engine, batch)]
    seconds = time.monotonic() - began
    stats = [request.stats for request in served]
    return [request.token_ids for request in served], {
        "seconds": seconds,
        "tokens_per_second": sum(each.num_generated_tokens for each in stats) / seconds,
        "prompt_tokens_per_second": sum(each.num_prompt_tokens for each in stats) / seconds,
        "mean_acceptance_length": SpeculationStats.merged(stats).mean_acceptance_length,
        "preemptions": sum(each.num_preemptions for each in stats),
    }
