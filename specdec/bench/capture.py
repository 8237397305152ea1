"""What graphs cost: seconds and memory of each family, and whether memory grows."""

import resource
from collections import Counter
from collections.abc import Iterator

import torch

from specdec.bench.bench import Bench
from specdec.bench.pair import EngineSpec, build_engine
from specdec.bench.report import Row
from specdec.bench.serving import generate, greedy
from specdec.engine import Engine

GIB = 1 << 30


def capture(bench: Bench) -> Iterator[Row]:
    """Time each family's graphs; capture chunks in breakable pieces, then by torch.compile."""
    is_captured = bench.pair.device.type == "cuda" and not bench.pair.config.enforce_eager
    for is_compiled in (False, True) if is_captured else ():
        spec = EngineSpec(
            num_speculative_tokens=max(bench.ks),
            max_num_seqs=max(64, *bench.options.batches),
            max_tokens=512,
            max_model_len=bench.options.model_len,
            has_prefill_graphs=True,
            compile_piecewise=is_compiled,
        )
        bench.pair.drop()
        engine = build_engine(bench.pair, spec)
        chunks: Row = {"chunks": "compiled" if is_compiled else "breakable"}
        sums: Counter[str] = Counter()
        for name, family in engine.runner.graphs.counters().items():
            figures: dict[str, float] = {
                "sizes": len(family.captures),
                "graphs": family.num_graphs,
                "seconds": family.seconds,
                "gib": family.num_bytes / GIB,
            }
            sums.update(figures)
            yield chunks | {"family": name} | figures
        yield chunks | {"family": "all"} | sums
        engine.runner.graphs.clear_all_graphs()


def memory(bench: Bench) -> Iterator[Row]:
    """Read memory after a first batch, at four points of many rounds, and after clear_graphs."""
    engine = bench.engine(max(bench.ks), max(bench.options.batches))
    jobs = greedy(bench.prompts(8)[:8], bench.options.max_tokens)
    num_done = num_rows = 0
    while num_done < bench.options.rounds_of_memory:
        num_done += max(request.stats.num_rounds for request in generate(engine, jobs))
        if num_done >= num_rows * bench.options.rounds_of_memory / 4:
            num_rows += 1
            yield _memory_row(engine, f"after {num_done} rounds")
    engine.runner.graphs.clear_all_graphs()
    yield _memory_row(engine, "after clear_graphs")
    bench.pair.drop()


def _memory_row(engine: Engine, when: str) -> Row:
    """allocated: tensors; reserved: by torch; used: on the whole GPU; host: this process's peak."""
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
