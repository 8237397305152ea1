"""How long one prompt waits for its first token, by its length, with graphs and op by op."""

from collections.abc import Iterator

from specdec.bench.bench import Bench
from specdec.bench.pair import EngineSpec, joined
from specdec.bench.report import Row
from specdec.bench.serving import generate, greedy
from specdec.bench.timing import Spread

LENGTHS = (64, 128, 256, 512, 1024, 2048, 8192, 16384)
LONGEST_EAGER = 2048  # from there on launching op by op costs nothing
NUM_REQUESTS = 12  # of each length; the first two warm up


def first_token(bench: Bench) -> Iterator[Row]:
    """Milliseconds to the first token of one request, by graphs in pieces and op by op."""
    K = max(bench.ks)
    limit = bench.pair.target.config.max_position_embeddings
    lengths = [length for length in LENGTHS if length < limit]
    few = [length for length in lengths if length <= LONGEST_EAGER]
    for how, is_eager, these in (("graphs", False, lengths), ("op by op", True, few)):
        if not these or not bench.has_time(f"first_token: {how}"):
            continue
        spec = EngineSpec(
            num_speculative_tokens=K,
            max_num_seqs=1,
            max_model_len=these[-1] + 1,
            has_prefill_graphs=True,
            enforce_eager=is_eager,
        )
        engine = bench.pair.engine(spec)
        for length in these:
            jobs = greedy([joined(bench.pair.prompts, length)], 1)
            runs = [generate(engine, jobs) for _ in range(NUM_REQUESTS)]
            seconds = [each.stats.time_to_first_token or 0.0 for [each] in runs[2:]]
            mode = engine.runner.graphs.dispatch_ragged(1, length, 1).target.mode.name
            spread = Spread.of([1e3 * each for each in seconds])
            figures = {"ms": spread.median, "low": spread.low, "high": spread.high}
            yield {"prompt_tokens": length, "asked": how, "runs_as": mode} | figures
        bench.pair.drop(spec)
