"""Does any request's text depend on the others, even if the cache is too small for all of them?

Requests arrive between steps, share beginnings of prompts, differ in length, limits, stop strings
and K, are aborted, and lose their blocks to each other; the prefix cache is on and the host runs
ahead. Each is then run alone, without a draft, and must give the same tokens, an aborted one the
beginning of them. Exit code 1 and a list of faults, if there are any.

    python -m scripts.soak                              # 500 requests, 10 minutes on one CPU core
    python -m scripts.soak --num-requests 40 --seed 7
    python -m scripts.soak --device cuda                # graphs, and the checkpoint's own dtype
"""

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass

from tqdm import tqdm

from specdec import LLM, SamplingParams
from specdec.requests.intake import NewRequest
from specdec.requests.request import Request
from weights.demo import demo_prompts

MAX_K = 7
MAX_MODEL_LEN = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """A request, and the steps at which it arrives and is aborted, if it is."""

    prompt: list[int]
    values: dict[str, object]
    num_speculative_tokens: int
    priority: int
    arrival: int
    abort: int | None

    def params(self, **more: object) -> SamplingParams:
        return SamplingParams(temperature=0.0, **self.values, **more)

    def new_request(self) -> NewRequest:
        params = self.params(num_speculative_tokens=self.num_speculative_tokens)
        return NewRequest(prompt=self.prompt, params=params, priority=self.priority)


def plan_requests(count: int, seed: int, max_prompt: int, max_tokens: int) -> list[Plan]:
    """Prompts are beginnings of 12 texts, so that some share a prefix."""
    chance = random.Random(seed)
    prompts = demo_prompts()["prompts"]
    texts = [
        [token for i in range(12) for token in prompts[(start + i) % len(prompts)]]
        for start in range(12)
    ]
    plans = []
    arrival = 0
    for _ in range(count):
        arrival += chance.choice([0, 0, 0, 0, 1, 9])
        prompt = chance.choice(texts)[: chance.randint(1, max_prompt)]
        values = {
            "max_tokens": chance.randint(1, max_tokens),
            "stop": chance.choice([(), (), "\n\n", "return", " = "]),
            "ignore_eos": chance.random() < 0.5,
        }
        abort = arrival + chance.randint(0, 20) if chance.random() < 0.15 else None
        plans.append(
            Plan(prompt, values, chance.randint(0, MAX_K), chance.choice([0, 0, 1]), arrival, abort)
        )
    return plans


def run_together(llm: LLM, plans: list[Plan]) -> list[Request]:
    """All requests through one engine, step by step."""
    engine = llm.engine
    requests = []
    with tqdm(total=len(plans), desc="together", disable=None) as bar:
        step = 0
        while len(requests) < len(plans) or engine.has_unfinished:
            while len(requests) < len(plans) and plans[len(requests)].arrival <= step:
                plan = plans[len(requests)]
                requests += engine.add_requests([plan.new_request()])
            for plan, request in zip(plans, requests, strict=False):
                if plan.abort == step:
                    engine.abort(request.request_id)
            engine.step()
            step += 1
            bar.update(sum(request.finish is not None for request in requests) - bar.n)
    engine.drain()
    return requests


def faults(llm: LLM, plans: list[Plan], requests: list[Request]) -> list[str]:
    """Faults in the outputs, in the statistics, and in what remains after the run."""
    device = llm.config.device
    sizes = {"max_num_seqs": 1, "max_model_len": MAX_MODEL_LEN}
    alone = LLM("demo", device=device, enable_prefix_caching=False, **sizes)
    found = []
    for plan, request in zip(tqdm(plans, desc="alone", disable=None), requests, strict=True):
        expected = alone.generate([plan.prompt], plan.params(), use_tqdm=False)[0].outputs[0]
        ours = request.output().outputs[0]
        if ours.finish_reason == "abort":
            expected.token_ids = expected.token_ids[: len(ours.token_ids)]
        elif (ours.text, ours.finish_reason) != (expected.text, expected.finish_reason):
            found.append(f"request {request.request_id}: text or end differ")
        if ours.token_ids != expected.token_ids:
            found.append(f"request {request.request_id}: tokens differ")
        found += count_faults(plan, request)
    scheduler = llm.engine.scheduler
    num_held = scheduler.pool.num_blocks - scheduler.pool.num_free
    if num_held or scheduler.has_unfinished or scheduler.num_in_flight:
        found.append(f"after the run {num_held} blocks are not free")
    return found


def count_faults(plan: Plan, request: Request) -> list[str]:
    """A round adds its accepted tokens and one, a prompt one, a resumed prefill none."""
    stats = request.stats
    K = plan.num_speculative_tokens
    if not request.token_ids:
        return []
    surplus = 1 + stats.num_rounds + stats.num_accepted_tokens - len(request.token_ids)
    is_right = 0 <= surplus <= K and all(drafted <= K for drafted in stats.num_drafted)
    if is_right:
        return []
    return [f"request {request.request_id}: {surplus} tokens more than rounds account for"]


def soak(
    count: int,
    seed: int,
    max_prompt: int = 400,
    max_tokens: int = 100,
    num_rows: int = 8,
    device: str = "cpu",
) -> dict[str, object]:
    """Run, check, and count what happened."""
    began = time.monotonic()
    draft = {"model": "demo", "num_speculative_tokens": MAX_K}
    llm = LLM(
        "demo",
        draft,
        device=device,
        max_num_seqs=num_rows,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=96,
        num_kv_blocks=max(9, num_rows * 3 // 2),
        async_scheduling=True,
    )
    plans = plan_requests(count, seed, max_prompt, max_tokens)
    requests = run_together(llm, plans)
    stats = [request.stats for request in requests]
    return {
        "requests": count,
        "seed": seed,
        "device": device,
        "aborted": sum(request.finish.reason == "abort" for request in requests if request.finish),
        "preemptions": sum(each.num_preemptions for each in stats),
        "cached_tokens": sum(each.num_cached_tokens for each in stats),
        "tokens": sum(each.num_generated_tokens for each in stats),
        "rounds": sum(each.num_rounds for each in stats),
        "faults": faults(llm, plans, requests),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    result = soak(args.num_requests, args.seed, device=args.device)
    print("\n".join(result["faults"]) or "no faults")
    print(json.dumps(result))
    sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()
