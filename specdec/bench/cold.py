"""From process start to the first token, in a process that imports specdec as a script does."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from specdec.bench.report import Row
from specdec.llm import LLM
from specdec.requests.params import SamplingParams
from specdec.runner import Runner
from specdec.speculative_config import AUTO
from specdec.start import load as loading
from weights.demo import demo_prompts

FRESH = "from specdec import LLM; from specdec.bench.cold import main; main()"
TIMED = {
    "load_target": "target weights",
    "load_eagle": "draft weights",
    "Tokenizer": "tokenizer",
    "compile_ahead": "kernels",
    "measure_needs": "memory plan",
    "measure_costs": "costs of steps",
    "measure_round_costs": "costs of steps",
}


def cold_rows(
    target: str, draft: str | None, K: int | str, engine: Mapping[str, object], starts: int = 2
) -> list[Row]:
    """Make a row for each start: seconds of each phase, and the memory of the graphs.

    No other engine should hold GPU memory meanwhile.
    K: num_speculative_tokens, which "auto" may be too. engine: arguments of LLM.

    The starts share a cache of compiled kernels, empty at first, as after an installation.
    """
    options = json.dumps(dict(engine))
    command = [sys.executable, "-c", FRESH, target, str(draft), str(K), options]
    rows: list[Row] = []
    known = 0
    with tempfile.TemporaryDirectory() as cache:
        for i in range(starts):
            began = time.time()
            env = os.environ | {"TRITON_CACHE_DIR": cache}
            done = subprocess.run([*command, str(began)], capture_output=True, text=True, env=env)
            if done.returncode != 0:
                raise RuntimeError(f"the fresh process failed:\n{done.stderr[-2000:]}")
            compiled = len(list(Path(cache).rglob("*.cubin"))) - known
            known += compiled
            seconds = json.loads(done.stdout.splitlines()[-1])
            rows.append({"start": i + 1, "kernels_compiled": compiled} | seconds)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds: dict[str, Callable[[str], object]] = {
        "target": str,
        "draft": str,
        "k": lambda k: k if k == AUTO else int(k),
        "engine": json.loads,
        "began": float,
    }
    for name, kind in kinds.items():
        parser.add_argument(name, type=kind)
    args = parser.parse_args()
    seconds: dict[str, float] = {"python and imports": time.time() - args.began}
    if args.engine["device"].startswith("cuda"):
        with _timed("CUDA", seconds):
            torch.zeros(1, device=args.engine["device"])
    for name, phase in TIMED.items():
        setattr(loading, name, _timed(phase, seconds)(getattr(loading, name)))
    setattr(Runner, "capture", _timed("capture", seconds)(Runner.capture))  # noqa: B010
    has_draft = args.draft != "None"
    speculation = {"model": args.draft, "num_speculative_tokens": args.k} if has_draft else None
    start = time.perf_counter()
    llm = LLM(args.target, speculative_config=speculation, **args.engine)
    seconds["the rest of LLM()"] = time.perf_counter() - start
    prompts = demo_prompts()["prompts"]
    assert isinstance(prompts, list)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with _timed("first token", seconds):
        llm.generate(prompts[0], params, use_tqdm=False)
    inside = sum(seconds.get(phase, 0.0) for phase in {*TIMED.values(), "capture"})
    seconds["the rest of LLM()"] -= inside
    seconds["total"] = time.time() - args.began
    num_bytes = sum(family.num_bytes for family in llm.engine.runner.graphs.counters().values())
    print(json.dumps(seconds | {"graphs, GiB": num_bytes / (1 << 30)}))


@contextmanager
def _timed(phase: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
