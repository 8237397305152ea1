"""What a user chooses to measure: the options of `specdec bench` and `specdec bench serve`.

Options that no suite of a run would read are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdec.cli.choices import MANY, TARGET
from specdec.cli.errors import Wording
from specdec.config import MAX_MODEL_LEN, MOST_SEQS, EngineConfig
from specdec.described import about, described, option
from specdec.serve.http.options import MOST_SECONDS
from specdec.sizes import TreeShape
from specdec.speculative_config import MOST_DRAFTS

SUITES = (
    "protocol, rounds, exactness, context, products, loop, noise, trees, requests, first_token, "
    "cold; with commas; or all"
)
ABOUT = {each.name: each.help for each in described(EngineConfig)}
LENGTHS = (2, MAX_MODEL_LEN)
OUTPUT = about("write the last line's JSON to a file too")
CHARTS = about("directory for PNG charts (needs matplotlib)", metavar="DIRECTORY")
LOADS = ("loop", "noise")
READERS = {  # options that only some suites read
    "contexts": ("exactness", "context"),
    "max_model_len": ("protocol", "rounds", "exactness", *LOADS, "trees", "cold"),
    "adaptive": (*LOADS, "requests", "cold"),
    "ramp": ("loop",),
    "trees": ("context", "trees"),
    "temperatures": (*LOADS, "trees"),
    "thresholds": ("trees",),
}
GONE = {  # suites of earlier versions, and what to do instead
    "k": "give --suite protocol,rounds -k 0,1,2,3,4,5,6,7,8 --batch 1",
    "batch": "give --suite protocol --batch 1,2,4,8,16,32",
    "ramp": "give --suite loop --ramp",
    "attention": "give --suite exactness, which times rounds with attention of others",
    "capture": "give --suite cold, which times it too",
    "memory": "give --suite cold, which reads it too",
    "costs": "give --suite rounds, or --suite context after long prompts",
    "zero": "compare K = 0 of --suite protocol with K = 0 of --suite trees, which has a draft",
    "stops": "give --suite trees --thresholds -1,0.2",
    "gaps": "run python -m scripts.profile_round, which says when the device is idle",
    "waiting": "give --suite loop, whose gaps between tokens have prompts in them",
    "prefill": "give --suite first_token",
    "padding": "read LLM.graph_counters(), which counts the batches of each graph",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchChoices:
    """Measure speed beside plain decoding.

    All is measured in one process; figures are refused where outputs differ.
    """

    target: str = field(default="demo", metadata=TARGET)
    draft: str | None = option(None, "EAGLE draft", unset='"demo" for "demo", else none')
    suite: str = option("protocol", SUITES)
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
        None, "of trees and context, rows x levels x top_k: 8x6x4,16x6x4", unset="eight, of trees"
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
    num_prompts: int = option(8, "prompts at the small batches", bounds=(1, 4096))
    prompts: Path | None = field(
        default=None,
        metadata=about("JSON file", unset="prompts.json beside the target", exists=True),
    )
    max_tokens: int = option(160, "tokens of each answer", bounds=LENGTHS)
    repeats: int = option(
        2, "whole runs, the best counts; the suite loop has a row for each", bounds=(1, MANY)
    )
    num_rounds: int = option(30, "rounds timed by the device's clock", bounds=(1, MANY))
    max_seconds: float | None = option(
        None, "begin nothing more after this many seconds", bounds=(0, MOST_SECONDS)
    )
    seed: int | None = option(None, ABOUT["seed"], unset="random")
    dtype: str = option("auto", ABOUT["dtype"])
    device: str = option("auto", ABOUT["device"])
    max_model_len: int | None = option(
        None, "longest context, where no suite sets it", unset="4096", bounds=LENGTHS
    )
    enforce_eager: bool = option(False, ABOUT["enforce_eager"])
    adaptive: bool | None = option(None, "loads with as many drafts as pay, too; on a GPU")
    ramp: bool | None = option(
        None, "in the suite loop: a load that rises and falls, in place of others"
    )
    json: Path | None = field(default=None, metadata=OUTPUT)
    charts: Path | None = field(default=None, metadata=CHARTS)
    command: str
    wording: Wording

    @property
    def eagle(self) -> str | None:
        """Name the draft: of the bundled pair its own, unless another is given."""
        return self.draft or ("demo" if self.target == "demo" else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServeChoices:
    """Measure a server under load.

    Requests arrive at random, as a Poisson process, whatever the server's speed; lengths are like
    ShareGPT's. The figures say how long requests wait.
    """

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
    json: Path | None = field(default=None, metadata=OUTPUT)
    charts: Path | None = field(default=None, metadata=CHARTS)
    command: str


def chosen(suite: str) -> list[str]:
    """Put the suites into the order of SUITES, so that neighbours share engines."""
    names = suite.split(",")
    for name in filter(GONE.get, names):
        raise ValueError(f"--suite {name}: there is no such suite any more; {GONE[name]}")
    known = SUITES.partition(";")[0].split(", ")
    unknown = [name for name in names if name not in (*known, "all")]
    if unknown:
        raise ValueError(f"--suite {unknown[0]}: allowed are all, {', '.join(known)}")
    return [name for name in known if name in names or "all" in names]


def refuse_unread(given: BenchChoices) -> None:
    """Refuse options that no suite of this run would read, or that contradict it."""
    if given.eagle is None and (any(given.ks or ()) or given.trees is not None):
        drafting = "--trees" if given.trees else f"--num-speculative-tokens {_shown(given.ks)}"
        raise ValueError(f"{drafting} without a draft: give --draft too")
    names = chosen(given.suite)
    for name, readers in READERS.items():
        value = getattr(given, name)
        if value is not None and not set(readers) & set(names):
            option = f"--{name}".replace("_", "-") + ("" if value is True else f" {_shown(value)}")
            which = ", ".join(readers)
            only = f"the suite {which} alone: give --suite {which} too"
            some = f"the suites {which}: give one of them too"
            raise ValueError(f"{option} is for {only if len(readers) == 1 else some}")
    if given.enforce_eager and "noise" in names:
        why = "with the suite noise, which measures graphs: leave one out"
        raise ValueError(f"--enforce-eager {why}")


def _shown(value: object) -> str:
    if isinstance(value, TreeShape):
        return f"{value.num_rows}x{value.num_levels}x{value.top_k}"
    return ",".join(map(_shown, value)) if isinstance(value, list) else str(value)
