"""Serving many requests: throughput against batches one after another, idle time, and who waits for a long prompt.

Lengths are ShareGPT-like: prompts log-normal around 160 tokens (sigma 1, 8 to 1,024), answers around 128 (sigma 0.9,
4 to 512), drawn with seed 0; the texts are the pair's prompts joined. Outputs of both ways of serving are compared.
"""

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from specdec.bench.bench import Bench, Row
from specdec.bench.pair import EngineSpec, joined
from specdec.bench.profile import profile_serving
from specdec.bench.timing import Clock, Mark
from specdec.engine import Engine
from specdec.requests.params import SamplingParams
from specdec.requests.request import Request
from specdec.requests.stats import SpeculationStats
from specdec.runner import Runner

NUM_REQUESTS, BATCH = 256, 32
NUM_ON_CPU = 4
LONGEST_PROMPT, LONGEST_ANSWER = 1024, 512
LONG_PROMPT, NUM_WAITING = 16384, 4


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt and how many tokens are wanted behind it."""

    prompt: list[int]
    params: SamplingParams


def gap_rows(bench: Bench) -> list[Row]:
    """For each batch at the largest K, from a trace of the engine's own loop."""
    rows: list[Row] = []
    K = max(bench.ks)
    for batch in bench.options.batches:
        if bench.has_time(f"gaps: batch {batch}"):
            found = profile_serving(
                bench.engine(K, batch), bench.prompts(batch)[:batch], bench.options.num_rounds // 3
            )
            times: Row = {
                "round_ms": found.span_us / 1e3,
                "busy_ms": found.busy_us / 1e3,
                "gap_share": found.gap_share,
            }
            rows.append({"num_speculative_tokens": K, "batch": batch} | times)
    return rows


def request_rows(bench: Bench) -> list[Row]:
    """Both ways, for K = 0 and the K's asked for."""
    rows: list[Row] = []
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
        jobs = draw_jobs(
            bench.pair.prompts, NUM_REQUESTS if bench.pair.device.type == "cuda" else NUM_ON_CPU
        )
        engine = bench.pair.engine(spec)
        _serve(engine, [jobs[:BATCH]])  # warm-up
        batches = [jobs[i : i + BATCH] for i in range(0, len(jobs), BATCH)]
        at_once, one_by_one = _serve(engine, [jobs]), _serve(engine, batches)
        is_same = [r.token_ids for r in at_once[0]] == [r.token_ids for r in one_by_one[0]]
        base: Row = {"num_speculative_tokens": K, "requests": len(jobs), "same_tokens": is_same}
        rows += [base | {"served": "one batch at a time"} | _figures(*one_by_one)]
        rows += [base | {"served": "continuously"} | _figures(*at_once)]
        bench.pair.drop(spec)
    return rows


def draw_jobs(prompts: Sequence[Sequence[int]], count: int) -> list[Job]:
    """Lengths by the stated distribution; each text starts with another of the pair's prompts."""
    chance = random.Random(0)

    def draw(median: int, sigma: float, least: int, most: int) -> int:
        return min(max(round(chance.lognormvariate(math.log(median), sigma)), least), most)

    jobs = []
    for i in range(count):
        turned = [*prompts[i % len(prompts) :], *prompts[: i % len(prompts)]]
        prompt = joined(turned, draw(160, 1.0, 8, LONGEST_PROMPT))
        wanted = draw(128, 0.9, 4, LONGEST_ANSWER)
        jobs.append(
            Job(prompt, SamplingParams(temperature=0.0, max_tokens=wanted, ignore_eos=True))
        )
    return jobs


def _serve(engine: Engine, batches: Sequence[Sequence[Job]]) -> tuple[list[Request], float]:
    """All requests in order, and the seconds that it took."""
    began, requests = time.monotonic(), []
    for batch in batches:
        requests += engine.add_requests([(job.prompt, job.params) for job in batch])
        while engine.has_unfinished:
            engine.step()
    seconds = time.monotonic() - began
    engine.drain()
    return requests, seconds


def _figures(requests: Sequence[Request], seconds: float) -> Row:
    stats = [request.stats for request in requests]
    return {
        "seconds": seconds,
        "tokens_per_second": sum(each.num_generated_tokens for each in stats) / seconds,
        "prompt_tokens_per_second": sum(each.num_prompt_tokens for each in stats) / seconds,
        "mean_acceptance_length": SpeculationStats.merged(stats).mean_acceptance_length,
        "preemptions": sum(each.num_preemptions for each in stats),
    }


def waiting_rows(bench: Bench) -> list[Row]:
    """Some requests run; then the long prompt comes. Times by the device's clock, chunks and rounds as they ran."""
    K, pair = max(bench.ks), bench.pair
    if pair.target.config.max_position_embeddings < LONG_PROMPT + 64:
        return []
    spec = EngineSpec(
        num_speculative_tokens=K,
        max_num_seqs=NUM_WAITING + 1,
        max_tokens=LONG_PROMPT + 64,
        max_model_len=LONG_PROMPT + 64,
    )
    engine = pair.engine(spec)
    long = Job(
        joined(pair.prompts, LONG_PROMPT),
        SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    )
    _serve(engine, [[long]])  # warm-up
    steps = _steps_around(engine, pair.prompts[:NUM_WAITING], long)
    pair.drop(spec)
    chunks, rounds = ([ms for kind, ms in steps if kind == wanted] for wanted in ("chunk", "round"))
    longest = max(sum(ms for _, ms in steps[i:j]) for i, j in _round_pairs(steps))
    bound = max(chunks) + max(rounds)
    return [
        {
            "num_speculative_tokens": K,
            "prompt_tokens": LONG_PROMPT,
            "chunks": len(chunks),
            "longest_chunk_ms": max(chunks),
            "longest_round_ms": max(rounds),
            "longest_wait_ms": longest,
            "is_within_a_chunk_and_a_round": longest <= bound,
        }
    ]


def _steps_around(
    engine: Engine, prompts: Sequence[Sequence[int]], long: Job
) -> list[tuple[str, float]]:
    """The kind and the milliseconds of each step from just before the long prompt to just behind it."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    engine.add_requests([(prompt, params) for prompt in prompts])
    for _ in range(6):
        engine.step()
    clock = Clock(engine.runner.device)
    with _marked(engine.runner, clock) as marks:
        [request] = engine.add_requests([(long.prompt, long.params)])
        while request.finish is None:
            engine.step()
    engine.abort_all()
    engine.drain()
    clock.wait()
    return [(kind, clock.milliseconds(start, end)) for kind, start, end in marks]


def _round_pairs(steps: Sequence[tuple[str, float]]) -> list[tuple[int, int]]:
    """Spans from behind one round to behind the next: what a running request waits for its next tokens."""
    ends = [i + 1 for i, (kind, _) in enumerate(steps) if kind == "round"]
    return list(itertools.pairwise(ends))


@contextmanager
def _marked(runner: Runner, clock: Clock) -> Iterator[list[tuple[str, Mark, Mark]]]:
    """Every step of the body with the moments of its start and end in the stream."""
    marks: list[tuple[str, Mark, Mark]] = []
    originals = {"chunk": runner.run_chunk, "round": runner.run_round}

    def marked(kind: str, *options: object) -> object:
        start = clock.mark()
        result = originals[kind](*options)  # type: ignore[operator]
        marks.append((kind, start, clock.mark()))
        return result

    for kind in originals:
        setattr(runner, f"run_{kind}", lambda *options, kind=kind: marked(kind, *options))
    try:
        yield marks
    finally:
        for kind in originals:
            delattr(runner, f"run_{kind}")
