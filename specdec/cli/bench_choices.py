"""What a user chooses to measure: the options of `specdec bench` and `specdec bench serve`.

Options that no suite of a run would read are refused.
"""

from dataclasses import dataclass, field
from pathlib import Path

from specdec.bench.options import BenchOptions, LoadOptions
from specdec.cli.choices import TARGET
from specdec.cli.errors import Wording
from specdec.config import EngineConfig
from specdec.described import about, described, option
from specdec.sizes import TreeShape
from specdec.speculative_config import MOST_RANKS, SpeculativeConfig

SUITES = (
    "protocol, rounds, exactness, context, products, experts, loop, noise, drafts, trees, "
    "requests, first_token, cold; with commas; or all"
)
ABOUT = {each.name: each.help for each in described(EngineConfig)}
ABOUT_DRAFT = {each.name: each.help for each in described(SpeculativeConfig)}
OUTPUT = about("write the last line's JSON to a file too")
CHARTS = about("directory for PNG charts (needs matplotlib)", metavar="DIRECTORY")
LOADS = ("loop", "noise")
READERS = {  # options that only some suites read
    "contexts": ("exactness", "context"),
    "max_model_len": ("protocol", "rounds", "exactness", *LOADS, "drafts", "trees", "cold"),
    "adaptive": (*LOADS, "requests", "cold"),
    "ramp": ("loop",),
    "oracle": ("drafts",),
    "trees": ("context", "loop", "trees", "requests"),
    "temperatures": (*LOADS, "trees"),
    "thresholds": ("trees",),
}
ON_ONE_GPU = ("exactness", "products", "experts", "noise", "cold")  # suites
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
    draft: str | None = option(None, "draft", unset="that of a bundled target, else none")
    suite: str = option("protocol", SUITES)
    measured: BenchOptions
    prompts: Path | None = field(
        default=None,
        metadata=about("JSON file", unset="prompts.json beside the target", exists=True),
    )
    seed: int | None = option(None, ABOUT["seed"], unset="random")
    dtype: str = option("auto", ABOUT["dtype"])
    device: str = option("auto", ABOUT["device"])
    enforce_eager: bool = option(False, ABOUT["enforce_eager"])
    tensor_parallel_size: int = option(
        1, ABOUT["tensor_parallel_size"], bounds=(1, MOST_RANKS), short="-tp"
    )
    draft_tensor_parallel_size: int | None = option(
        None,
        ABOUT_DRAFT["draft_tensor_parallel_size"],
        unset="--tensor-parallel-size",
        bounds=(1, MOST_RANKS),
    )
    json: Path | None = field(default=None, metadata=OUTPUT)
    charts: Path | None = field(default=None, metadata=CHARTS)
    command: str
    wording: Wording

    @property
    def eagle(self) -> str | None:
        """Name the draft: of a bundled pair its own, unless another is given."""
        return self.draft or (self.target if self.target in ("demo", "demo-experts") else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServeChoices:
    """Measure a server under load.

    Requests arrive at random, as a Poisson process, whatever the server's speed; lengths are like
    ShareGPT's. The figures say how long requests wait.
    """

    load: LoadOptions
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
    measured = given.measured
    if given.eagle is None and (any(measured.ks or ()) or measured.trees or measured.oracle):
        ks = f"--num-speculative-tokens {_shown(measured.ks)}"
        drafting = "--trees" if measured.trees else "--oracle" if measured.oracle else ks
        raise ValueError(f"{drafting} without a draft: give --draft too")
    names = chosen(given.suite)
    for name, readers in READERS.items():
        value = getattr(measured, name)
        if value not in (None, False) and not set(readers) & set(names):
            option = f"--{name}".replace("_", "-") + ("" if value is True else f" {_shown(value)}")
            which = ", ".join(readers)
            only = f"the suite {which} alone: give --suite {which} too"
            some = f"the suites {which}: give one of them too"
            raise ValueError(f"{option} is for {only if len(readers) == 1 else some}")
    if given.enforce_eager and "noise" in names:
        why = "with the suite noise, which measures graphs: leave one out"
        raise ValueError(f"--enforce-eager {why}")

    size = f"--tensor-parallel-size {given.tensor_parallel_size}"
    alone = [name for name in names if name in ON_ONE_GPU]
    if given.tensor_parallel_size > 1 and alone:
        raise ValueError(f"{size}: the suite {alone[0]} measures one GPU: leave one of them out")
    if given.tensor_parallel_size > 1 and measured.oracle is not None:
        raise ValueError(f"{size}: --oracle replaces the drafts of one GPU: leave one of them out")


def _shown(value: object) -> str:
    if isinstance(value, TreeShape):
        return f"{value.num_rows}x{value.num_levels}x{value.top_k}"
    return ",".join(map(_shown, value)) if isinstance(value, list) else str(value)
