"""What all suites share: the pair, the outputs of plain decoding, and the time left.

Every output is compared with plain decoding of the same prompts in the same process. If it differs,
its row has the difference instead of figures.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specdec.bench.options import BenchOptions
from specdec.bench.pair import EngineSpec, Pair
from specdec.bench.report import Row
from specdec.bench.serving import GREEDY, Outputs, Served, merged, serve
from specdec.bench.timing import tokens_needed
from specdec.engine import Engine
from specdec.requests.params import SamplingParams
from specdec.sizes import MAX_TREE_REQUESTS
from specdec.start.speculation import (
    AUTO_TREE,
    MOST_LEVELS,
    Drafting,
    check_number,
    of_blocks,
    of_draft,
    usual_number,
)
from weights.load import LoadedEagle

MOST_CONTEXT = 131072  # tokens of all requests after long prompts
DEFAULT_KS = 3, 5  # of a draft, beside plain decoding
SEEDS = (0, 1)  # of sampled runs: texts differ in how well they can be foretold


@dataclass(slots=True, eq=False)
class Bench:
    """bandwidth: bytes per second that the device reads. results: the rows of the protocol."""

    pair: Pair
    bandwidth: float
    options: BenchOptions
    outputs: Outputs = field(default_factory=Outputs)
    results: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    skipped: list[str] = field(default_factory=list)

    @property
    def ks(self) -> tuple[int, ...]:
        """K = 0 first: the others are compared with it."""
        eagle = self.pair.eagle
        if eagle is None:
            return (0,)
        given = self.options.ks
        if given is None:
            return (0, *dict.fromkeys(min(K, eagle.config.max_drafts) for K in DEFAULT_KS))
        return (0, *(K for K in given if K > 0))

    def check_draft(self) -> None:
        """Refuse what the draft cannot do, before anything is measured: ValueError."""
        eagle, rates = self.pair.eagle, self.options.oracle
        if rates is not None and not 0 < max(self.ks) <= len(rates):
            most = f"from 1 to {len(rates)} drafts, as there are rates"
            raise ValueError(f"--oracle with K = {max(self.ks)}: give -k {most}")
        if eagle is None or not eagle.config.is_parallel:
            return
        config, trees = eagle.config, self.options.trees
        check_number(max(*self.ks, *(tree.num_levels for tree in trees or ()), 0), config)
        refused = {"thresholds": "drafts that stop come from EAGLE heads only"}
        if not config.grows_trees:
            refused["trees"] = "it proposes chains alone"
        for name, why in refused.items():
            if getattr(self.options, name) is not None:
                raise ValueError(f"--{name} with a {config.method} draft: {why}: leave it out")

    @property
    def batches(self) -> Sequence[int]:
        """A CPU has time for one request."""
        return self.options.batches or ((1,) if self.pair.device.type == "cpu" else (1, 8, 32))

    @property
    def contexts(self) -> Sequence[int]:
        return self.options.contexts or (256, 1024, 4096, 8192, 16384, 32768)

    @property
    def drafting(self) -> list[Drafting]:
        """List what suites of loads run: each K, each of --trees, then as many drafts as pay."""
        found = [Drafting(K) for K in self.ks]
        found += [Drafting(tree.num_levels, tree=tree) for tree in self.options.trees or ()]
        if self.options.adaptive and self.pair.eagle is not None:
            found.append(self.auto(self.pair.eagle))
        return found

    def auto(self, eagle: LoadedEagle) -> Drafting:
        """Draft as many tokens as pay; of a parallel draft at most what it is trained for."""
        adaptive = Drafting(MOST_LEVELS, True, AUTO_TREE, confidence_threshold=None)
        if eagle.config.is_parallel:
            return of_blocks(adaptive, eagle.config, usual_number(eagle.config))
        return of_draft(adaptive, eagle.config.draft_vocab_size)

    def has_time(self, what: str) -> bool:
        """Say whether --max-seconds has not passed; if it has, note what is skipped."""
        limit = self.options.max_seconds
        if limit is None or time.monotonic() - self.began < limit:
            return True
        self.skipped.append(what)
        return False

    def runs_at_once(self, drafting: Drafting, batch: int, what: str) -> bool:
        """Say whether so many requests may draft so; if they may not, note what is skipped."""
        if drafting.has_fixed_tree and batch > MAX_TREE_REQUESTS:
            self.skipped.append(f"{what} (trees run for at most {MAX_TREE_REQUESTS} requests)")
            return False
        return True

    def prompts(self, batch: int) -> list[list[int]]:
        """Give at least `num_prompts`, in order, repeated if a batch needs more than there are."""
        prompts = self.pair.prompts
        return [prompts[i % len(prompts)] for i in range(max(self.options.num_prompts, batch))]

    def engine(
        self, drafting: Drafting, room: int | None = None, has_prefill_graphs: bool = False
    ) -> Engine:
        """Build an engine for the prompts, with the default graphs up to the largest batch.

        room: tokens of an answer; None: those of timed rounds too
        """
        options = self.options
        needed = tokens_needed(options.num_rounds, drafting.num_tokens)
        room = max(options.max_tokens, needed) if room is None else room
        return self.pair.engine(
            EngineSpec(
                drafting=drafting,
                max_num_seqs=max(self.batches),
                max_tokens=max(map(len, self.pair.prompts)) + room,
                max_model_len=options.model_len,
                has_prefill_graphs=has_prefill_graphs,
            )
        )

    def serve(
        self, engine: Engine, batch: int, params: SamplingParams = GREEDY
    ) -> tuple[Served, Row]:
        """Serve all prompts after a warm-up: the fastest of some greedy runs, or all seeds.

        The row says where an output differs from plain decoding; it is empty if none does.
        """
        prompts = self.prompts(batch)
        max_tokens = self.options.max_tokens
        serve(engine, prompts[:batch], batch, min(max_tokens, 16), params)  # warm-up
        each = [params] * self.options.repeats
        if params.temperature > 0:
            each = [replace(params, seed=seed) for seed in SEEDS]
        runs = [serve(engine, prompts, batch, max_tokens, params) for params in each]
        different = [row for run in runs if (row := self.outputs.difference(run.requests))]
        best = max(runs, key=lambda run: run.tokens_per_second)
        return merged(runs) if params.temperature > 0 else best, different[0] if different else {}
