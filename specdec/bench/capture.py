"""What graphs cost: seconds and memory of each family, and whether serving lets memory grow."""

import resource
from collections import Counter
from collections.abc import Sequence

import torch

from graphs.counters import GraphCounters
from specdec.bench.pair import EngineSpec, Pair, build_engine
from specdec.bench.serving import generate
from specdec.engine import Engine
from specdec.requests.params import SamplingParams

GIB = 1 << 30
Row = dict[str, object]


def capture_rows(pair: Pair, K: int, max_num_seqs: int, max_model_len: int) -> list[Row]:
    """Every family with default sizes, chunks split by breakable capture and by torch.compile."""
    rows: list[Row] = []
    for is_compiled in (False, True):
        if pair.device.type != "cuda":
            break
        spec = EngineSpec(
            num_speculative_tokens=K,
            max_num_seqs=max_num_seqs,
            max_tokens=512,
            max_model_len=max_model_len,
            has_prefill_graphs=True,
            compile_piecewise=is_compiled,
        )
        pair.drop()
        engine = build_engine(pair, spec)
        counters = engine.runner.graphs.counters()
        families: list[Row] = [
            {
                "chunks": "compiled" if is_compiled else "breakable",
                "family": name,
                "sizes": len(family.captures),
                "graphs": family.num_graphs,
                "seconds": family.seconds,
                "gib": family.num_bytes / GIB,
            }
            for name, family in counters.items()
        ]
        sums = {
            key: sum(float(str(row[key])) for row in families)
            for key in ("sizes", "graphs", "seconds", "gib")
        }
        rows += [*families, {"chunks": families[0]["chunks"], "family": "all"} | sums]
        engine.runner.clear_graphs()
    return rows


def batch_rows(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Row]:
    """The batches that each family ran while the prompts were served at once: how, over how many rows, padded to."""
    families = engine.runner.graphs.counters()
    before = {name: Counter(counters.batches) for name, counters in families.items()}
    generate(
        engine, prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    )
    served = {
        name: GraphCounters(batches=counters.batches - before[name])
        for name, counters in families.items()
    }
    return [{"family": name} | row for name, counters in served.items() for row in counters.rows()]


def memory_rows(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, num_rounds: int
) -> list[Row]:
    """GiB in use after a first batch, at four places on the way to so many rounds, and after clear_graphs."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    done, rows = 0, list[Row]()
    while done < num_rounds:
        outputs = generate(engine, prompts, params)
        done += max(output.stats.num_rounds for output in outputs)
        if done >= len(rows) * num_rounds / 4:
            rows.append(memory_row(engine, f"after {done} rounds"))
    engine.runner.clear_graphs()
    return [*rows, memory_row(engine, "after clear_graphs")]


def memory_row(engine: Engine, when: str) -> Row:
    """allocated: tensors; reserved: what torch holds; used: what the driver gave, to anybody; host: our own peak."""
    device = engine.runner.device
    host: Row = {
        "when": when,
        "host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
    }
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
