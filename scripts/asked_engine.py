"""The engine of one tree, in a process that compare_commits.py asks by lines of JSON.

A line with "model" builds an LLM of these arguments. Any other line runs requests in a closed loop.
Imports nothing but the standard library and the specdec that PYTHONPATH names.
"""

import hashlib
import json
import sys
import time
from itertools import islice
from typing import Any

from specdec import LLM, SamplingParams

Answer = dict[str, float | str]


def main() -> None:
    """Answer each line by a line."""
    answers, sys.stdout = sys.stdout, sys.stderr
    llm: Any = None
    for question in map(json.loads, sys.stdin):
        if "model" not in question:
            found = run(llm.engine, **question)
        else:
            if llm is not None:
                llm.shutdown()
            began = time.perf_counter()
            llm = LLM(**question)
            found = {"starts per second": 1 / (time.perf_counter() - began)}
            families = llm.engine.runner.graphs.counters().values()
            num_bytes = sum(family.num_bytes for family in families)
            found["engines' graphs per TiB"] = (1 << 40) / max(num_bytes, 1)
        print(json.dumps(found), file=answers, flush=True)


def run(engine: Any, prompts: Any, batch: int, temperature: float, answer: int) -> Answer:
    """Keep `batch` requests running until each prompt has its answer; give tokens per second."""
    sampling: Any = {"temperature": temperature, "max_tokens": answer, "ignore_eos": True}
    jobs = ((text, SamplingParams(seed=i, **sampling)) for i, text in enumerate(prompts))
    done: list[Any] = []
    running, began = 0, time.perf_counter()
    while len(done) < len(prompts) or running:
        new = engine.add_requests(islice(jobs, batch - running))
        done += new
        running += len(new) - sum(request.is_finished for request in engine.step())
    speed = answer * len(done) / (time.perf_counter() - began)
    tokens = json.dumps([list(request.token_ids) for request in done])
    return {"speed": speed, "tokens": hashlib.sha256(tokens.encode()).hexdigest()}


if __name__ == "__main__":
    main()
