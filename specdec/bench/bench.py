"""What all suites share: the pair, plain decoding's outputs, earlier runs, and the time left.

Every output is compared with plain decoding of the same prompts in the same process. If it differs,
its row has the difference instead of figures.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.bench.card import Bandwidth
from specdec.bench.pair import EngineSpec, Pair
from specdec.bench.report import Row
from specdec.bench.rounds import tokens_needed
from specdec.bench.serving import Served, first_difference, serve
from specdec.engine import Engine
from specdec.sizes import TreeShape
from specdec.start.speculation import AUTO_TREE, MOST_LEVELS, Drafting, of_draft
from weights.load import LoadedEagle

MODEL_LEN = 4096
MOST_CONTEXT = 131072  # tokens of all requests after long prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """ks: values of K for most suites. adaptive: in suites of loads also as many drafts as pay, in
    chains or trees; chains: in chains alone. ramp: in the suite loop, a load that rises and falls.

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
    chains: bool = False
    ramp: bool = False
    trees: Sequence[TreeShape] | None = None
    temperatures: Sequence[float] | None = None
    thresholds: Sequence[float] | None = None

    @property
    def model_len(self) -> int:
        return self.max_model_len or MODEL_LEN


@dataclass(slots=True, eq=False)
class Bench:
    """plain_ids: by prompt. runs: by K and batch."""

    pair: Pair
    bandwidth: Bandwidth
    options: BenchOptions
    plain_ids: dict[int, list[int]] = field(default_factory=dict)
    runs: dict[tuple[int, int], Row] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    skipped: list[str] = field(default_factory=list)

    @property
    def ks(self) -> tuple[int, ...]:
        """K = 0 first: the others are compared with it."""
        has_draft = self.pair.eagle is not None
        return (0, *(K for K in self.options.ks if K > 0 and has_draft))

    @property
    def drafting(self) -> tuple[Drafting, ...]:
        """List what suites of loads run: each K, then as many drafts as pay."""
        fixed = map(Drafting, self.ks)
        eagle = self.pair.eagle
        if not self.options.adaptive or eagle is None:
            return tuple(fixed)
        return (*fixed, self.auto(eagle))

    def auto(self, eagle: LoadedEagle) -> Drafting:
        """Draft as many tokens as pay."""
        tree = None if self.options.chains else AUTO_TREE
        adaptive = Drafting(MOST_LEVELS, is_adaptive=True, tree=tree)
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

    def engine(self, K: int, batch: int) -> Engine:
        """Build an engine with graphs up to the largest batch."""
        largest = self.options.max_num_seqs or max(self.options.batches, default=1)
        room = max(self.options.max_tokens, tokens_needed(self.options.num_rounds, K))
        return self.pair.engine(
            EngineSpec(
                num_speculative_tokens=K,
                max_num_seqs=max(batch, largest),
                max_tokens=max(map(len, self.pair.prompts)) + room,
                max_model_len=self.options.model_len,
            )
        )

    def run(self, K: int, batch: int) -> Row:
        """Run the protocol at one setting, once; plain decoding of the same batch first."""
        if K > 0 and (0, batch) not in self.runs:
            self.run(0, batch)
        if (K, batch) not in self.runs:
            engine = self.engine(K, batch)
            prompts = self.prompts(batch)
            max_tokens = self.options.max_tokens
            serve(engine, prompts[:batch], batch, min(max_tokens, 16))  # warm-up
            runs = [serve(engine, prompts, batch, max_tokens) for _ in range(self.options.repeats)]
            difference = self.difference(runs)
            best = max(runs, key=lambda run: run.tokens_per_second)
            row = self._row(K, best) if difference is None else refused(K, batch, difference)
            self.runs[K, batch] = row
        return self.runs[K, batch]

    def difference(self, runs: Sequence[Served]) -> str | None:
        """Say where any run differs from the first run of K = 0."""
        num = len(self.pair.prompts)
        for run in runs:
            ids = enumerate(run.token_ids)
            plain = [self.plain_ids.setdefault(i % num, tokens) for i, tokens in ids]
            difference = first_difference(run.token_ids, plain)
            if difference is not None:
                return difference
        return None

    def _row(self, K: int, run: Served) -> Row:
        speed = run.tokens_per_second
        plain = speed if K == 0 else self.runs[0, run.batch].get("tokens_per_second")
        rates = run.stats.acceptance_rate_per_position
        return {
            "num_speculative_tokens": K,
            "batch": run.batch,
            "tokens_per_second": speed,
            "against_plain": speed / plain if isinstance(plain, float) else None,
            "round_ms": run.round_ms,
            "mean_acceptance_length": run.stats.mean_acceptance_length,
            "per_user": speed / run.batch,
            "accepted_per_position": " ".join(f"{rate:.3f}" for rate in rates),
        }


def refused(K: int, batch: int, difference: str) -> Row:
    """Give no figures for a wrong engine."""
    return {"num_speculative_tokens": K, "batch": batch, "refused": difference}
