"""How long drafts take in a round, what graphs cost, and how fast the pair is, in one table.

With --oracle drafts hold at given rates (oracle.py), so that kinds of drafts are compared by what
they cost, at the acceptance that is claimed for them. Rounds are timed with the draft's own
proposals, whose number is the same.
"""

from collections.abc import Iterator
from contextlib import nullcontext

from specdec.bench.bench import Bench
from specdec.bench.cold import of_graphs
from specdec.bench.oracle import Texts, oracle
from specdec.bench.report import Row
from specdec.bench.serving import Served, generate, greedy
from specdec.bench.timing import time_phases, time_rounds, tokens_needed
from specdec.engine import Engine
from specdec.start.speculation import Drafting

VERIFY, EXTEND, PROPOSE = ("forward", "choose"), ("prefill_draft",), ("decode_draft",)
Plain = dict[int, tuple[Served, float]]  # by batch: what it served, and the ms of a round


def drafts(bench: Bench) -> Iterator[Row]:
    """Time drafts in rounds, and serve prompts; with --oracle as if drafts held at these rates.

    extend: the draft's keys and values of the step's rows, with the first level of an EAGLE or
    P-EAGLE head; propose: what it drafts then; rest: what is neither they nor the verification.
    Without a draft there is plain decoding alone.
    """
    plain: Plain = {}
    for K in bench.ks:
        yield from draft_rows(bench, K, plain)
    bench.pair.drop()


def draft_rows(bench: Bench, K: int, plain: Plain) -> Iterator[Row]:
    """Measure one K at every batch. plain: filled by K = 0, and read by others"""
    eagle = bench.pair.eagle
    for batch in bench.batches:
        if not bench.has_time(f"drafts: K = {K}, batch {batch}"):
            continue
        row: Row = {"draft": eagle.config.method if K and eagle is not None else "none"}
        row |= {"num_speculative_tokens": K, "batch": batch}
        rates = bench.options.oracle if K else None
        texts = {} if rates is None else _texts(bench)
        engine = _engine(bench, K)
        seed = bench.pair.config.seed or 0
        with nullcontext() if rates is None else oracle(engine, texts, rates[:K], seed):
            run, difference = bench.serve(engine, batch)
        yield row | (difference or _figures(bench, engine, batch, run, plain))


def _figures(bench: Bench, engine: Engine, batch: int, run: Served, plain: Plain) -> Row:
    """Time rounds of the draft's own proposals, and add what was served and what graphs cost."""
    K, rates = engine.runner.sizes.num_speculative_tokens, bench.options.oracle
    what = engine, bench.prompts(batch)[:batch], bench.options.num_rounds
    round_ms, phases = time_rounds(*what).median, time_phases(*what)
    if K == 0:
        plain[batch] = run, round_ms
    served, plain_ms = plain.get(batch, (None, None))
    extend, propose, verify = (
        sum(phases.pop(act) or 0.0 for act in acts) for acts in (EXTEND, PROPOSE, VERIFY)
    )
    graphs = of_graphs(engine.runner.graphs.counters().values())
    return {
        "device_round_ms": round_ms,
        "plain_round_ms": plain_ms,
        "draft_ms": extend + propose,
        "extend_ms": extend,
        "propose_ms": propose,
        "verify_ms": verify,
        "rest_ms": sum(ms or 0.0 for ms in phases.values()),
        **run.figures(served),
        "accepted_per_position": " ".join(
            f"{rate:.3f}" for rate in run.stats.acceptance_rate_per_position
        ),
        **({"oracle": " ".join(map(str, rates[:K]))} if rates and K else {}),
        "graphs": graphs["graphs"],
        "capture_seconds": graphs["seconds"],
        "graphs_gib": graphs["gib"],
    }


def _engine(bench: Bench, K: int) -> Engine:
    """Build an engine as users get it, with graphs of prompts too."""
    room = max(_longest(bench), tokens_needed(bench.options.num_rounds, K))
    return bench.engine(Drafting(K), room, has_prefill_graphs=True)


def _longest(bench: Bench) -> int:
    """Count the tokens of an answer and of drafts after its last one."""
    return bench.options.max_tokens + max(bench.ks)


def _texts(bench: Bench) -> Texts:
    """Find out what plain decoding says after each prompt."""
    prompts = dict.fromkeys(map(tuple, bench.prompts(max(bench.batches))))
    unknown = [each for each in prompts if len(bench.outputs.known(each)) < _longest(bench)]
    if unknown:
        ended = generate(_engine(bench, 0), greedy(unknown, _longest(bench)))
        if difference := bench.outputs.difference(ended):
            raise RuntimeError(f"plain decoding twice: {difference['refused']}")
    return {each: bench.outputs.known(each) for each in prompts}
