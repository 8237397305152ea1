"""What a draft costs that is not used: requests that draft nothing, with and without one loaded.

Three ways to decode plainly: an engine that was built without a draft; one with a draft whose
requests have speculate=False; and the same with num_speculative_tokens=0. Runs alternate, and each
figure has its spread.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from specdec.bench.bench import Bench
from specdec.bench.pair import EngineSpec, Pair
from specdec.bench.report import Row
from specdec.bench.serving import GREEDY, Served, first_difference, serve
from specdec.bench.timing import Spread
from specdec.engine import Engine
from specdec.requests.params import SamplingParams

NUM_RUNS = 5
NO_DRAFT = "built without a draft"


def zero(bench: Bench) -> Iterator[Row]:
    """Plain decoding without a draft, and with one that no request uses."""
    if max(bench.ks) == 0:
        return
    bare = Pair(
        target=bench.pair.target,
        eagle=None,
        tokenizer=bench.pair.tokenizer,
        prompts=bench.pair.prompts,
        device=bench.pair.device,
        config=bench.pair.config,
    )
    for batch in bench.options.batches:
        if bench.has_time(f"zero: batch {batch}"):
            yield from compared(_ways(bench, bare, batch), bench, batch)
            bare.drop()


def _ways(bench: Bench, bare: Pair, batch: int) -> dict[str, tuple[Engine, SamplingParams]]:
    spec = EngineSpec(
        num_speculative_tokens=max(bench.ks),
        max_num_seqs=max(batch, bench.options.max_num_seqs or 0),
        max_tokens=max(map(len, bare.prompts)) + bench.options.max_tokens,
        max_model_len=bench.options.model_len,
        has_prefill_graphs=True,
    )
    drafting = bench.pair.engine(spec)
    return {
        NO_DRAFT: (bare.engine(replace(spec, num_speculative_tokens=0)), GREEDY),
        "speculate=False": (drafting, replace(GREEDY, speculate=False)),
        "num_speculative_tokens=0": (drafting, replace(GREEDY, num_speculative_tokens=0)),
    }


def compared(
    ways: Mapping[str, tuple[Engine, SamplingParams]], bench: Bench, batch: int
) -> Iterator[Row]:
    """A row for each way. RuntimeError if both sides are the same engine, or a request drafts."""
    for name, (engine, _) in ways.items():
        if (engine.runner.draft is None) != (name == NO_DRAFT):
            raise RuntimeError(f"zero: {name}: this engine is no other than the one beside it")
    prompts = bench.prompts(batch)
    max_tokens = bench.options.max_tokens
    runs: dict[str, list[Served]] = {name: [] for name in ways}
    for i in range(NUM_RUNS + 1):  # the first one warms up
        for name, (engine, params) in ways.items():
            run = serve(engine, prompts, batch, max_tokens, params)
            if run.stats.num_drafted_tokens:
                raise RuntimeError(f"zero: {name}: {run.stats.num_drafted_tokens} tokens drafted")
            if i > 0:
                runs[name].append(run)
    expected = runs[NO_DRAFT][0].token_ids
    base = _speed(runs[NO_DRAFT]).median
    for name, served in runs.items():
        row: Row = {"batch": batch, "requests": name}
        differences = [first_difference(run.token_ids, expected) for run in served]
        difference = next(filter(None, differences), None)
        if difference is not None:
            yield row | {"num_speculative_tokens": 0, "refused": difference}
            continue
        speed = _speed(served)
        yield row | {
            "tokens_per_second": speed.median,
            "low": speed.low,
            "high": speed.high,
            "against_no_draft": speed.median / base,
        }


def _speed(runs: Sequence[Served]) -> Spread:
    return Spread.of([run.tokens_per_second for run in runs])
