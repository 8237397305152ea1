"""Which suites a run of bench has, and which options none of them would read."""

from specdec.cli.choices import SUITES, BenchChoices
from specdec.sizes import TreeShape

LOADS = ("loop", "noise")
READERS = {  # options that only some suites read
    "contexts": ("exactness", "context"),
    "rounds_of_memory": ("cold",),
    "max_model_len": ("protocol", "rounds", "exactness", *LOADS, "trees", "cold"),
    "max_num_seqs": ("protocol", "rounds", *LOADS, "trees", "requests", "cold"),
    "gpu_memory_utilization": ("cold",),
    "adaptive": (*LOADS, "requests", "cold"),
    "chains": (*LOADS, "requests"),
    "ramp": ("loop",),
    "trees": ("context", "trees"),
    "temperatures": (*LOADS, "trees"),
    "thresholds": ("trees",),
}
OF_GRAPHS = ("noise",)
GONE = {  # suites of earlier versions, and what to do instead
    "k": "give --suite protocol,rounds -k 0,1,2,3,4,5,6,7,8 --batch 1",
    "batch": "give --suite protocol --batch 1,2,4,8,16,32",
    "ramp": "give --suite loop --ramp",
    "attention": "give --suite exactness, which times it too",
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


def chosen(names: tuple[str, ...]) -> list[str]:
    """Put the suites into the order of SUITES, so that neighbours share engines."""
    for name in filter(GONE.get, names):
        raise ValueError(f"--suite {name}: there is no such suite any more; {GONE[name]}")
    known = SUITES.partition(";")[0].split(", ")
    unknown = [name for name in names if name not in (*known, "all")]
    if unknown:
        raise ValueError(f"--suite {unknown[0]}: allowed are all, {', '.join(known)}")
    return [name for name in known if name in names or "all" in names]


def refuse_unread(given: BenchChoices) -> None:
    """Refuse options that no suite of this run would read, or that contradict it."""
    if given.eagle is None and any(given.ks or ()):
        raise ValueError(
            f"--num-speculative-tokens {_shown(given.ks)} without a draft: give --draft too"
        )
    if given.eagle is None and given.trees is not None:
        raise ValueError("--trees without a draft: give --draft too")
    names = chosen(given.suites)
    for option, readers in READERS.items():
        if getattr(given, option) is not None and not set(readers) & set(names):
            which = ", ".join(readers)
            only = f"the suite {which} alone: give --suite {which} too"
            some = f"the suites {which}: give one of them too"
            raise ValueError(
                f"{_option(option, given)} is for {only if len(readers) == 1 else some}"
            )
    if given.chains and not given.adaptive:
        raise ValueError("--chains without --adaptive, whose drafts may be trees: give both")
    if given.enforce_eager:
        for name in OF_GRAPHS:
            if name in names:
                raise ValueError(
                    f"--enforce-eager with the suite {name}, which measures graphs: leave one out"
                )
    _check_rows(given)


def _check_rows(given: BenchChoices) -> None:
    """Refuse an engine with fewer rows than the requests of a batch."""
    rows, batches = given.max_num_seqs, given.batches or [1]
    if rows is not None and rows < max(batches):
        raise ValueError(
            f"--max-num-seqs {rows} with --batch {_shown(batches)}: give at least {max(batches)}"
        )


def _option(name: str, given: BenchChoices) -> str:
    option, value = f"--{name.replace('_', '-')}", getattr(given, name)
    return option if value is True else f"{option} {_shown(value)}"


def _shown(value: object) -> str:
    """Write a value in the form in which it was given."""
    if isinstance(value, TreeShape):
        return f"{value.num_rows}x{value.num_levels}x{value.top_k}"
    return ",".join(map(_shown, value)) if isinstance(value, list) else str(value)
