"""What suites of `specdec bench`, and its load of a server, are told: options of the command line.

Nothing here imports torch, for which `--help` need not wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.config import MAX_MODEL_LEN, MOST_SEQS
from specdec.described import about, option
from specdec.sizes import TreeShape
from specdec.speculative_config import MOST_DRAFTS

LENGTHS = (2, MAX_MODEL_LEN)
MANY = 1 << 20
MODEL_LEN = 4096
MOST_SECONDS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Holds what was given; None for what a suite chooses, see Bench and the suites.

    repeats: whole runs; num_rounds: timed rounds. adaptive: in suites of loads also as many drafts
    as pay, in chains or trees. ramp: in the suite loop, a load that rises and falls.
    """

    ks: Sequence[int] | None = option(
        None,
        "values of K; 0, plain decoding, is always one",
        unset="0,3,5",
        bounds=(0, MOST_DRAFTS),
        flag="--num-speculative-tokens",
        short="-k",
    )
    batches: Sequence[int] | None = option(
        None,
        "requests at a time",
        unset="1,8,32; 1 on a CPU",
        bounds=(1, MOST_SEQS),
        flag="--batch",
    )
    contexts: Sequence[int] | None = option(
        None, "prompt lengths of context and exactness", unset="six, 256 to 32768", bounds=LENGTHS
    )
    trees: Sequence[TreeShape] | None = option(
        None,
        "of trees, context and suites of loads, rows x levels x top_k: 8x6x4,16x6x4",
        unset="eight, of trees",
    )
    temperatures: Sequence[float] | None = option(
        None, "of loop, noise and trees", unset="0,0.8, of trees 0,0.7,1", bounds=(0.0, 100.0)
    )
    thresholds: Sequence[float] | None = option(
        None,
        "of the suite trees: below which drafts stop, -1: never",
        unset="five greedy, else 0.2",
        bounds=(-1.0, 1.0),
    )
    oracle: Sequence[float] | None = option(
        None,
        "of the suite drafts: make the first i drafts hold with these probabilities, 0.8,0.6,0.5",
        unset="the draft's own proposals",
        bounds=(0.0, 1.0),
    )
    num_prompts: int = option(8, "prompts at the small batches", bounds=(1, 4096))
    max_tokens: int = option(160, "tokens of each answer", bounds=LENGTHS)
    repeats: int = option(
        2, "whole runs, the best counts; the suite loop has a row for each", bounds=(1, MANY)
    )
    num_rounds: int = option(30, "rounds timed by the device's clock", bounds=(1, MANY))
    max_seconds: float | None = option(
        None, "begin nothing more after this many seconds", bounds=(0, MOST_SECONDS)
    )
    max_model_len: int | None = option(
        None, "longest context, where no suite sets it", unset="4096", bounds=LENGTHS
    )
    adaptive: bool = option(False, "loads with as many drafts as pay, too; on a GPU")
    ramp: bool = option(False, "in the suite loop: a load that rises and falls, in place of others")

    def __post_init__(self) -> None:
        rates = self.oracle
        if rates is None:
            return
        if not all(0 < rate <= 1 for rate in rates) or sorted(rates, reverse=True) != [*rates]:
            raise ValueError(
                f"--oracle {','.join(map(str, rates))}: give a number above 0 and at most 1 for "
                "each draft, the probability that it and those before it hold: none may rise"
            )

    @property
    def model_len(self) -> int:
        return self.max_model_len or MODEL_LEN


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Says how a server is asked: a run of num_requests for each rate."""

    url: str = field(
        metadata=about("of a server of OpenAI's API: http://127.0.0.1:8000", argument="URL")
    )
    rates: Sequence[float] | None = option(
        None,
        "requests a second, a run for each: 1,2,4",
        unset="1",
        bounds=(0.001, 1e6),
        flag="--request-rate",
    )
    num_requests: int = option(100, "of each run", bounds=(1, MANY))
    model: str | None = option(None, "the model's name", unset="the first one listed")
    is_chat: bool = option(False, "ask for chat completions, not for completions", flag="--chat")
    max_tokens: int | None = option(None, "most tokens of an answer", unset="1024", bounds=LENGTHS)
    temperature: float | None = option(None, "of each request", unset="the server's")
    ignore_eos: bool = option(False, "ask for full lengths (vLLM and specdec know it)")
    goodput: str | None = option(
        None, "limits in ms that a good answer keeps: ttft:500,tpot:50", unset="none"
    )
    seed: int = option(0, "of arrivals, lengths and prompts")
    timeout: float = option(600.0, "seconds that an answer may pause", bounds=(0.001, MOST_SECONDS))
    api_key: str | None = option(None, "sent with each request", envvar="SPECDEC_API_KEY")
