"""Who may import what, read from the source: a row per folder; what is not named is forbidden.

    python -m tests.layout          prints the rows

`violations(root)` checks the packages under a directory, so that the checker itself can be tested
on a small tree. Two kinds of files may import late: see LATE_IMPORTS.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("graphs", "weights", "specdec")


@dataclass(frozen=True)
class Row:
    """ours: our modules or folders; third: installed packages. Its own files always."""

    ours: tuple[str, ...] = ()
    third: tuple[str, ...] = ()


HOST = ("specdec.arguments", "specdec.sizes")
DESCRIBED = ("specdec.arguments", "specdec.described")
STEPPING = (*(*HOST, "specdec.requests", "specdec.scheduling.work", "specdec.kernels", "graphs"),)
MODEL = ("specdec.sizes", "specdec.kernels", "graphs", "weights")
TOLD = (*STEPPING, "specdec.rounds", "specdec.parallel")  # what other ranks are told of a step
STEP = (
    *(*STEPPING, "specdec.models", "specdec.rounds", "specdec.sampler", "specdec.passes"),
    "specdec.parallel.followers",
)
STORY = (
    *STEP,
    "specdec.step",
    "specdec.target",
    "specdec.drafts",
    "specdec.config",
    "specdec.speculative_config",
    "specdec.runner",
)
FEEDBACK = (*STORY, "specdec.scheduling")
ENGINE = (
    *(*FEEDBACK, "specdec.guided", "specdec.feedback", "specdec.deliver", "specdec.engine"),
    "weights",
)
LLM = (*ENGINE, *DESCRIBED, "specdec.from_vllm", "specdec.start", "specdec.options", "specdec.llm")

# an answer's text is read without a server, and the command line knows the formats' names
READING_NAMES = "tool_use events grammar json_calls xml_calls answer_reading"
READING_FILES = tuple(f"specdec.serve.http.agents.{name}" for name in READING_NAMES.split())
READING = Row(
    (
        *(*READING_FILES, "specdec.arguments", "specdec.requests.json_schemas"),
        "specdec.requests.structured_outputs",
    )
)

# a file or a folder -> its row; the longest name that fits counts
ROWS: dict[str, Row] = {
    "graphs": Row(third=("torch", "tqdm")),
    "weights": Row(third=("torch", "safetensors", "tqdm")),
    "weights.bars": Row(third=("tqdm",)),
    "weights.errors": Row(),
    "specdec": Row(),
    "specdec.arguments": Row(),
    "specdec.sizes": Row(),
    "specdec.from_vllm": Row(),
    "specdec.described": Row(("specdec.arguments",)),
    "specdec.speculative_config": Row((*DESCRIBED, "specdec.from_vllm")),
    "specdec.config": Row(
        (*DESCRIBED, "specdec.from_vllm", "specdec.speculative_config", "graphs.modes")
    ),
    "specdec.options": Row(
        (*DESCRIBED, "specdec.config", "specdec.speculative_config", "specdec.from_vllm")
    ),
    "specdec.sampling_params": Row(("specdec.requests",)),
    "specdec.outputs": Row(("specdec.requests",)),
    "specdec.requests": Row(HOST),
    "specdec.requests.tokenizer_files": Row(
        ("specdec.requests", "weights.errors", "weights.fields", "weights.files.guard")
    ),
    "specdec.requests.tokenizer_classes": Row(third=("tokenizers",)),
    "specdec.requests.file_tokenizer": Row(("specdec.requests",), ("tokenizers",)),
    "specdec.requests.transformers_reader": Row(third=("transformers",)),
    "specdec.requests.params": Row(
        (*HOST, "specdec.requests", "specdec.from_vllm", "weights.errors", "weights.fields")
    ),
    "specdec.requests.template_worker": Row(third=("jinja2",)),
    "specdec.scheduling": Row((*HOST, "specdec.requests")),
    "specdec.scheduling.planner": Row(("specdec.scheduling", "specdec.sizes"), ("numpy",)),
    "specdec.scheduling.ways": Row(("specdec.scheduling", "specdec.sizes"), ("numpy",)),
    "specdec.scheduling.history": Row(("specdec.scheduling", "specdec.sizes"), ("numpy",)),
    "specdec.scheduling.outcomes": Row(("specdec.scheduling", "specdec.sizes"), ("numpy",)),
    "specdec.scheduling.factors": Row(("specdec.scheduling",), ("numpy",)),
    "specdec.scheduling.costs": Row(("specdec.sizes",), ("numpy",)),
    "specdec.scheduling.probes": Row(),
    "specdec.scheduling.statistics": Row(("specdec.sizes",)),
    "specdec.scheduling.gains": Row(third=("numpy",)),
    "specdec.guided": Row((*HOST, "specdec.requests"), ("numpy",)),
    "specdec.guided.grammars": Row(
        ("specdec.requests", "specdec.guided.mask_threads"), ("llguidance", "numpy")
    ),
    "specdec.guided.step_masks": Row(
        (
            *("specdec.requests", "specdec.scheduling.work", "specdec.rounds"),
            "specdec.guided.mask_threads",
        ),
        ("numpy",),
    ),
    "specdec.kernels": Row(third=("torch", "triton")),
    "specdec.kernels.compilations": Row(("specdec.kernels", "weights.bars"), ("torch", "triton")),
    "specdec.parallel.transfers": Row(third=("torch",)),
    "specdec.parallel.exchange": Row(
        ("specdec.kernels", "specdec.parallel.transfers", "weights.shard"), ("torch",)
    ),
    "specdec.models": Row((*MODEL, "specdec.parallel.exchange"), ("torch",)),
    "specdec.kernels.block_sums": Row(("specdec.kernels", "weights.shard"), ("torch",)),
    "specdec.kernels.cut_ids": Row(("weights.shard",), ("torch",)),
    "specdec.rounds": Row(STEPPING, ("torch", "numpy")),
    "specdec.sampler": Row((*STEPPING, "specdec.rounds", "specdec.models"), ("torch",)),
    "specdec.passes": Row(
        (*STEPPING, "specdec.rounds", "specdec.models", "specdec.config"), ("torch",)
    ),
    "specdec.parallel": Row(("specdec.parallel",)),
    "specdec.parallel.followers": Row(TOLD, ("numpy",)),
    "specdec.parallel.ranks": Row(
        ("specdec.arguments", "specdec.parallel", "weights.shard"), ("torch",)
    ),
    "specdec.parallel.group": Row(
        ("specdec.parallel", "specdec.kernels.push", "weights.shard"), ("torch",)
    ),
    "specdec.parallel.messages": Row(TOLD, ("numpy",)),
    "specdec.parallel.lead": Row((*TOLD, "weights.shard"), ("numpy", "torch")),
    "specdec.parallel.follow": Row((*TOLD, "specdec.runner", "weights.shard"), ("numpy", "torch")),
    "specdec.parallel.begin": Row(
        (
            *("specdec.parallel", "specdec.config", "specdec.speculative_config"),
            *("specdec.start.speculation", "graphs.addresses"),
        ),
        ("torch",),
    ),
    "specdec.parallel.worker": Row(("specdec.parallel", "specdec.start"), ("torch",)),
    "specdec.target": Row(STEP, ("torch",)),
    "specdec.drafts": Row(STEP, ("torch",)),
    "specdec.drafts.make": Row(
        (*STEP, "specdec.drafts", "specdec.parallel.exchange", "weights"), ("torch",)
    ),
    "specdec.step": Row((*STEP, "specdec.target", "specdec.drafts"), ("numpy",)),
    "specdec.runner": Row((*STORY, "specdec.parallel.exchange", "weights"), ("torch", "numpy")),
    "specdec.feedback": Row(FEEDBACK, ("numpy",)),
    "specdec.deliver": Row((*STEPPING, "specdec.rounds", "specdec.scheduling")),
    "specdec.engine": Row(ENGINE, ("torch",)),
    "specdec.start": Row((*ENGINE, "specdec.parallel"), ("torch", "numpy", "huggingface_hub")),
    "specdec.parallel.equal_bits": Row(("specdec.kernels", "weights")),
    "specdec.llm": Row(LLM),
    "specdec.serve": Row(LLM),
    "specdec.serve.http": Row(
        (*LLM, "specdec.serve"),
        ("starlette", "uvicorn", "prometheus_client"),
    ),
    **dict.fromkeys(READING_FILES, READING),
    "specdec.fleet": Row((*LLM, "specdec.serve"), ("ray", "starlette", "numpy")),
    "specdec.bench": Row((*LLM, "specdec.parallel"), ("torch", "matplotlib", "triton", "httpx2")),
    # nothing of ours: a yardstick must not be the shipped kernel
    "specdec.bench.yardsticks": Row(third=("torch",)),
    "specdec.bench.expert_yardstick": Row(third=("torch",)),
    "specdec.bench.fp8_yardstick": Row(third=("torch",)),
    "specdec.tune": Row(("specdec.kernels", "specdec.models", "graphs", "weights"), ("torch",)),
    "specdec.cli": Row(
        (
            *(*LLM, "specdec.serve", "specdec.fleet", "specdec.bench", "specdec.tune"),
            "specdec.parallel.processes",
        ),
        ("torch", "typer", "rich"),
    ),
    "specdec.__main__": Row(("specdec.cli",)),
}

# files that may import inside functions or under conditions, and why
LATE_IMPORTS = {
    "graphs/__init__.py": "names are imported when asked for: graphs.modes needs no torch",
    "weights/__init__.py": "names are imported when asked for: weights.errors needs no torch",
    "specdec/__init__.py": "public names are imported when they are asked for",
    "specdec/bench/charts.py": "matplotlib is an extra",
    "specdec/cli/__init__.py": "a command imports its file when called: --help needs no torch",
    "specdec/cli/batch.py": "ray is an extra",
    "specdec/cli/serve.py": "the engine's process starts before this one imports torch",
    "specdec/cli/figures.py": "threads.py needs torch, which the engine has imported by then",
    "specdec/fleet/__init__.py": "ray is an extra: the error says how to install it",
    "specdec/guided/guides.py": "llguidance is an extra",
    "specdec/kernels/__init__.py": "Triton, behind one device check",
    "specdec/requests/tokenizer_files.py": "transformers, where tokenizer.json is not enough",
}


def violations(root: Path) -> list[str]:
    """One line for every import that the layout forbids, "file:line: what"."""
    found = []
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            for line, what in _violations_of(path, ast.parse(file.read_text())):
                found.append(f"{path}:{line}: {what}")
    return found


def table() -> str:
    """The rows as text."""
    width = max(map(len, ROWS)) + 2
    lines = [f"{'place':<{width}}may import of ours; of third parties"]
    for place, row in ROWS.items():
        lines.append(f"{place:<{width}}{', '.join(row.ours) or '-'}; {', '.join(row.third) or '-'}")
    return "\n".join(lines)


def _violations_of(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for node in ast.walk(tree):
        for name in _imported(node):
            problem = _forbidden(module, name)
            if problem:
                yield node.lineno, problem
    if path not in LATE_IMPORTS:
        yield from _late_imports(tree)


def _imported(node: ast.AST) -> list[str]:
    """Dotted names of the modules that a statement imports; "." for a relative import."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level:
            return ["."]
        # `from specdec import llm` imports a module too, `from specdec.llm import LLM` a name
        is_package = node.module in PACKAGES
        return (
            [f"{node.module}.{alias.name}" for alias in node.names]
            if is_package
            else [str(node.module)]
        )
    return []


def _forbidden(module: str, name: str) -> str | None:
    top = name.split(".")[0]
    if name == ".":
        return "relative import: write the whole name"
    if top == "unittest":
        return "unittest: what may be exchanged is passed, or kernels/backend.py's"
    if top in sys.stdlib_module_names:
        return None
    place = place_of(module)
    if place is None:
        return f"{module} has no row in tests/layout.py"
    if top not in PACKAGES:
        return None if top in ROWS[place].third else f"{place} may not import {top}"
    allowed = (place, *ROWS[place].ours)
    if any(_is_in(name, each) or each.startswith(name + ".") for each in allowed):
        return None
    return f"{place} may not import {name}"


def place_of(module: str) -> str | None:
    """The row of a module: the longest name that fits."""
    return max((place for place in ROWS if _is_in(module, place)), key=len, default=None)


def _is_in(name: str, place: str) -> bool:
    # the rows of whole packages hold for what has no row of its own
    is_own = name == place or name.startswith(place + ".")
    return is_own and (place != "specdec" or name == place)


def _late_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    top_level = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top_level:
            yield node.lineno, "import inside a function or a block"
        if isinstance(node, ast.Name | ast.Attribute | ast.alias) and "TYPE_CHECKING" in ast.dump(
            node, False
        ):
            yield node.lineno, "TYPE_CHECKING"
        if isinstance(node, ast.Attribute) and node.attr == "import_module":
            yield node.lineno, "importlib.import_module"


if __name__ == "__main__":
    print(table())
