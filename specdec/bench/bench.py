"""What all suites share: the pair, the outputs of plain decoding, and the time left.

Every output is compared with plain decoding of the same prompts in the same process. If it differs,
its row has the difference instead of figures.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specdec.bench.pair import EngineSpec, Pair
from specdec.bench.report import Row
from specdec.bench.serving import GREEDY, Outputs, Served, merged, serve
from specdec.bench.timing import tokens_needed
from specdec.engine import Engine
from specdec.requests.params import SamplingParams
from specdec.sizes import TreeShape
from specdec.start.speculation import AUTO_TREE, MOST_LEVELS, Drafting, of_draft
from weights.load import LoadedEagle

MODEL_LEN = 4096
MOST_CONTEXT = 131072  # tokens of all requests after long prompts
SEEDS = (0, 1)  # of sampled runs: texts differ in how well they can be foretold


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """ks: values of K for most suites. adaptive: in suites of loads also as many drafts as pay, in
    chains or trees. ramp: in the suite loop, a load that rises and falls.

    repeats: whole runs; num_rounds: timed rounds.

    trees, temperatures, thresholds: None: those of the suites that have some.

    max_model_len, max_num_seqs: None for MODEL_LEN and the largest batch, and in the suite cold for
    the defaults of LLM.
    """

    ks: Sequence[int] = (0, 3, 5)
    batches: Sequence[int] = (1, 8, 32)
    contexts: Sequence[int] = (256, 1024, 4096, 8192, 16384, 32768)
    num_prompts: int = 8
    max_tokens: int = 160
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    repeats: int = 2
    num_rounds: int = 30
    rounds_of_memory: int = 1000
    max_seconds: float | None = None
    adaptive: bool = False
    ramp: bool = False
    trees: Sequence[TreeShape] | None = None
    temperatures: Sequence[float] | None = None
    thresholds: Sequence[float] | None = None

    @property
    def model_len(self) -> int:
        return self.max_model_len or MODEL_LEN


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
        has_draft = self.pair.eagle is not None
        return (0, *(K for K in self.options.ks if K > 0 and has_draft))

    @property
    def drafting(self) -> list[Drafting]:
        """List what suites of loads run: each K, then as many drafts as pay."""
        found = [Drafting(K) for K in self.ks]
        if self.options.adaptive and self.pair.eagle is not None:
            found.append(self.auto(self.pair.eagle))
        return found

    def auto(self, eagle: LoadedEagle) -> Drafting:
        """Draft as many tokens as pay."""
        adaptive = Drafting(MOST_LEVELS, True, AUTO_TREE, confidence_threshold=None)
        return of_draft(adaptive, eagle.config.draft_vocab_size)

    def has_time(self, what: str) -> bool:
        """Say whether --max-seconds has not passed; if it has, note what is skipped."""
        limit = self.options.max_seconds
        if limit is None or time.monotonic() - self.began < limit:
            return True
        self.skipped.append(what)
        return False

    def prompts(self, batch: int) -> list[list[int]]:
        """Give at least `num_prompts`, in order, repeated if a batch needs more than there are."""
        prompts = self.pair.prompts
        return [prompts[i % len(prompts)] for i in range(max(self.options.num_prompts, batch))]

    def engine(self, drafting: Drafting, room: int | None = None) -> Engine:
        """Build an engine for the prompts, with the default graphs up to the largest batch.

        room: tokens of an answer; None: those of timed rounds too
        """
        options = self.options
        needed = tokens_needed(options.num_rounds, drafting.num_tokens)
        room = max(options.max_tokens, needed) if room is None else room
        return self.pair.engine(
            EngineSpec(
                drafting=drafting,
                max_num_seqs=max(*options.batches, options.max_num_seqs or 1),
                max_tokens=max(map(len, self.pair.prompts)) + room,
                max_model_len=options.model_len,
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
