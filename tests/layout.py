"""The directions of imports, read from the source: what may import what, and where an import may stand.

`violations(root)` checks the packages under a directory, so that the checker itself can be tested on a small tree.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

# what each package may import beside the standard library and itself
PACKAGES = {
    "graphs": {"torch", "tqdm"},
    "weights": {"torch", "safetensors", "tqdm"},
    "specdec": {
        *("torch", "triton", "numpy", "transformers", "huggingface_hub", "tqdm", "typer", "rich"),
        *("matplotlib", "jinja2"),
        *("graphs", "weights"),
    },
}

# a module of specdec imports from its own layer and from those before it, never from those behind it
LAYERS = (
    # plain data and the host's rules over it
    (
        *("arguments", "accept", "block_pool", "buffers", "chunk_inputs", "config", "finish", "kv_cache", "locate"),
        *("output", "processors", "request", "sampling", "state", "stats", "step", "tokenizer", "upload"),
        *("deltas", "logprobs", "needs", "prefix_keys", "progress", "sampling_rows", "turns"),
        *("chat_template", "template_worker", "tokenizer_files"),
    ),
    ("kernels",),
    ("attention",),
    ("models",),
    ("tile_plans", "contexts", "graph_families"),
    ("target", "draft", "choice", "commit", "results"),
    ("round",),
    ("runner", "memory", "load"),
    ("intake", "scheduler", "engine", "engine_thread"),
    ("llm", "async_llm"),
    ("bench",),
    ("cli", "server", "__main__"),
)

# files that may import inside functions or under conditions, and why
LATE_IMPORTS = {
    "specdec/bench/charts.py": "matplotlib is an extra",
    "specdec/__init__.py": "public names are imported when they are asked for",
    "specdec/cli/__init__.py": "a command imports its file when it is called, so that --help does not wait for torch",
    "specdec/kernels/__init__.py": "Triton, behind one device check",
}


def violations(root: Path) -> list[str]:
    """One line for every import that the layout forbids, "file:line: what"."""
    found = []
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            found += [f"{path}:{line}: {what}" for line, what in _violations_of(path, ast.parse(file.read_text()))]
    return found


def _violations_of(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for name in _imported(node):
            problem = _forbidden(path, name)
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
        return [f"{node.module}.{alias.name}" for alias in node.names] if is_package else [str(node.module)]
    return []


def _forbidden(path: str, name: str) -> str | None:
    package, top = path.split("/")[0], name.split(".")[0]
    if name == ".":
        return "relative import: write the whole name"
    if top in sys.stdlib_module_names:
        return None
    if top != package:
        return None if top in PACKAGES[package] else f"{package} may not import {top}"
    if package != "specdec" or name == "specdec" or path == "specdec/__init__.py":
        return None
    own, other = _module(path.removesuffix(".py").replace("/", ".")), _module(name)
    missing = [module for module in (own, other) if _layer(module) is None]
    if missing:
        return f"specdec.{missing[0]} has no place in LAYERS (tests/layout.py)"
    if (_layer(other) or 0) > (_layer(own) or 0):
        return f"specdec.{own} may not import specdec.{other}, which lies above it"
    return None


def _module(dotted: str) -> str:
    """specdec.kernels.linear -> kernels"""
    return dotted.split(".")[1]


def _layer(module: str) -> int | None:
    return next((index for index, layer in enumerate(LAYERS) if module in layer), None)


def _late_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    top_level = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top_level:
            yield node.lineno, "import inside a function or a block"
        if isinstance(node, ast.Name | ast.Attribute | ast.alias) and "TYPE_CHECKING" in ast.dump(node, False):
            yield node.lineno, "TYPE_CHECKING"
        if isinstance(node, ast.Attribute) and node.attr == "import_module":
            yield node.lineno, "importlib.import_module"
