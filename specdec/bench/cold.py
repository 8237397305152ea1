"""Starts of fresh processes up to the first token, what graphs cost, and whether memory grows.

A fresh process runs `start`, and imports specdec as a script does.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from graphs.counters import GraphCounters
from specdec.bench.bench import Bench
from specdec.bench.pair import EngineSpec, build_engine
from specdec.bench.report import Row
from specdec.bench.serving import generate, greedy
from specdec.engine import Engine
from specdec.llm import LLM
from specdec.requests.params import SamplingParams
from specdec.runner import Runner
from specdec.speculative_config import AUTO
from specdec.start import load as loading
from specdec.start import runners
from specdec.start.speculation import Drafting
from weights.demo import demo_prompts

GIB = 1 << 30
STARTS = 2
ROUNDS_OF_MEMORY = 1000
FRESH = (
    "from specdec import LLM; from specdec.bench.cold import start; "
    "import json, sys; start(**json.loads(sys.argv[1]))"
)
TIMED = {
    "load_target": "target weights",
    "load_eagle": "draft weights",
    "Tokenizer": "tokenizer",
    "compile_ahead": "kernels",
    "measure_needs": "memory plan",
    "measure_costs": "costs of steps",
    "measure_round_costs": "costs of steps",
}


def starts(bench: Bench) -> Iterator[Row]:
    """Start fresh processes: seconds of each phase, and the memory of the graphs.

    They share a cache of compiled kernels, empty at first, as after an installation.
    """
    pair, options = bench.pair, bench.options
    pair.drop()
    names = ("dtype", "seed", "enforce_eager", "gpu_memory_utilization")
    engine: dict[str, object] = {name: getattr(pair.config, name) for name in names}
    engine |= {"device": str(pair.device), "max_model_len": options.max_model_len}
    draft = None
    if pair.eagle is not None:
        K = AUTO if options.adaptive else max(bench.ks)
        draft = {"model": str(pair.eagle.report.directory), "num_speculative_tokens": K}
    given = {"target": str(pair.target.report.directory), "speculation": draft, "engine": engine}
    known = 0
    with tempfile.TemporaryDirectory() as cache:
        for i in range(STARTS):
            arguments = json.dumps(given | {"began": time.time()})
            command = [sys.executable, "-c", FRESH, arguments]
            env = os.environ | {"TRITON_CACHE_DIR": cache}
            done = subprocess.run(command, capture_output=True, text=True, env=env)
            if done.returncode != 0:
                raise RuntimeError(f"the fresh process failed:\n{done.stderr[-2000:]}")
            compiled = len(list(Path(cache).rglob("*.cubin"))) - known
            known += compiled
            seconds = json.loads(done.stdout.splitlines()[-1])
            yield {"start": i + 1, "kernels_compiled": compiled} | seconds


def start(
    target: str,
    speculation: Mapping[str, object] | None,
    engine: Mapping[str, Any],
    began: float,
) -> None:
    """Time each phase of this process, and print them as JSON. engine: arguments of LLM."""
    seconds: dict[str, float] = {"python and imports": time.time() - began}
    if engine["device"].startswith("cuda"):
        with _timed("CUDA", seconds):
            torch.zeros(1, device=engine["device"])
    for name, phase in TIMED.items():
        module = loading if hasattr(loading, name) else runners
        setattr(module, name, _timed(phase, seconds)(getattr(module, name)))
    setattr(Runner, "capture", _timed("capture", seconds)(Runner.capture))  # noqa: B010
    with _timed("the rest of LLM()", seconds):
        llm = LLM(target, speculative_config=speculation, **engine)
    prompts = demo_prompts()["prompts"]
    assert isinstance(prompts, list)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with _timed("first token", seconds):
        llm.generate(prompts[0], params, use_tqdm=False)
    inside = sum(seconds.get(phase, 0.0) for phase in {*TIMED.values(), "capture"})
    seconds["the rest of LLM()"] -= inside
    seconds["total"] = time.time() - began
    num_bytes = sum(family.num_bytes for family in llm.engine.runner.graphs.counters().values())
    print(json.dumps(seconds | {"graphs, GiB": num_bytes / GIB}))


@contextmanager
def _timed(phase: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


def capture(bench: Bench) -> Iterator[Row]:
    """Time each family's graphs; capture chunks in breakable pieces, then by torch.compile."""
    is_captured = bench.pair.device.type == "cuda" and not bench.pair.config.enforce_eager
    for chunks in ("breakable", "compiled") if is_captured else ():
        spec = EngineSpec(
            drafting=Drafting(max(bench.ks)),
            max_num_seqs=max(64, *bench.batches),
            max_tokens=512,
            max_model_len=bench.options.model_len,
            has_prefill_graphs=True,
            compile_piecewise=chunks == "compiled",
        )
        bench.pair.drop()
        engine = build_engine(bench.pair, spec)
        row: Row = {"chunks": chunks}
        families = engine.runner.graphs.counters()
        for name, family in families.items():
            yield row | {"family": name} | of_graphs([family])
        yield row | {"family": "all"} | of_graphs(families.values())
        engine.runner.graphs.clear_all_graphs()


def of_graphs(families: Iterable[GraphCounters]) -> Row:
    """Add up what families of graphs cost: their number, seconds of capture, and memory."""
    found = list(families)
    return {
        "sizes": sum(len(family.captures) for family in found),
        "graphs": sum(family.num_graphs for family in found),
        "seconds": sum(family.seconds for family in found),
        "gib": sum(family.num_bytes for family in found) / GIB,
    }


def memory(bench: Bench) -> Iterator[Row]:
    """Read memory after a first batch, at four points of many rounds, and after clear_graphs."""
    engine = bench.engine(Drafting(max(bench.ks)))
    jobs = greedy(bench.prompts(8)[:8], bench.options.max_tokens)
    num_done = num_rows = 0
    while num_done < ROUNDS_OF_MEMORY:
        num_done += max(request.stats.num_rounds for request in generate(engine, jobs))
        if num_done >= num_rows * ROUNDS_OF_MEMORY / 4:
            num_rows += 1
            yield _memory_row(engine, f"after {num_done} rounds")
    engine.runner.graphs.clear_all_graphs()
    yield _memory_row(engine, "after clear_graphs")
    bench.pair.drop()


def _memory_row(engine: Engine, when: str) -> Row:
    """Read what tensors, torch, the whole GPU and this process at its peak hold."""
    device = engine.runner.device
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host: Row = {"when": when, "host_peak_gib": peak * 1024 / GIB}
    if device.type != "cuda":
        return host
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return host | {
        "allocated_gib": torch.cuda.memory_allocated(device) / GIB,
        "reserved_gib": torch.cuda.memory_reserved(device) / GIB,
        "used_gib": (total - free) / GIB,
        "peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
    }
