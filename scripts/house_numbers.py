"""How large is the house? Lines, files, long functions, and what one request runs through.

    python -m scripts.house_numbers            # a table
    python -m scripts.house_numbers --json     # the same numbers as one line of JSON

Product is specdec/, graphs/ and weights/. A file counts as run if one of its functions is called
while `LLM.generate` answers one greedy request with the bundled pair; kernels are left out of that.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

from specdec import LLM, SamplingParams, SpeculativeConfig
from specdec.config import GraphConfig
from specdec.passes.families import GraphFamilies
from specdec.sizes import EngineSizes
from specdec.start.speculation import AUTO_TREE

ROOT = Path(__file__).resolve().parents[1]
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# users give these arguments one by one, by name
PUBLIC = re.compile(r"specdec/(llm|cli/.*|serve/async_llm)\.py")


def texts(*folders: str) -> dict[str, str]:
    """The Python files that git knows, by path."""
    found = subprocess.check_output(["git", "ls-files", "--", *folders], cwd=ROOT, text=True)
    paths = [path for path in found.splitlines() if path.endswith(".py")]
    return {path: (ROOT / path).read_text() for path in paths if (ROOT / path).is_file()}


def num_lines(found: dict[str, str]) -> int:
    """Lines of all files together."""
    return sum(len(text.splitlines()) for text in found.values())


def lengths_and_arguments(path: str, text: str) -> list[tuple[int, int]]:
    """Lines and arguments of each function, but for those that Triton compiles."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTION) and "jit" not in "".join(map(ast.dump, node.decorator_list)):
            kinds = node.args.posonlyargs, node.args.args, node.args.kwonlyargs
            names = {each.arg for kind in kinds for each in kind}
            num_arguments = 0 if PUBLIC.fullmatch(path) else len(names - {"self", "cls"})
            found.append(((node.end_lineno or 0) - node.lineno + 1, num_arguments))
    return found


def num_constants(text: str) -> int:
    """Names in capitals that a module binds."""
    name = r"[A-Z][A-Z\d_]*"
    bound = re.findall(rf"^({name}(?:, {name})*)(?:: [^=\n]+)? =", text, re.MULTILINE)
    return sum(len(names.split(", ")) for names in bound)


def run_by_a_request(product: dict[str, str]) -> dict[str, str]:
    """The files whose functions one greedy request calls."""
    seen: set[str] = set()
    llm = LLM("demo", speculative_config=SpeculativeConfig("demo"), device="cpu")
    params = SamplingParams(temperature=0, max_tokens=40)
    sys.setprofile(lambda frame, event, _: seen.add(frame.f_code.co_filename))
    llm.generate("def __repr__(self):", params, use_tqdm=False)
    sys.setprofile(None)
    run = {path: text for path, text in product.items() if str(ROOT / path) in seen}
    return {path: text for path, text in run.items() if "/kernels/" not in path}


def num_families() -> int:
    """Graph families of an engine on a GPU that drafts by default."""
    sizes = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
    drafts = {"num_speculative_tokens": AUTO_TREE.num_levels, "tree": AUTO_TREE}
    engine_sizes = EngineSizes(**sizes, **drafts, num_kv_blocks=64, is_adaptive=True)
    return len(GraphFamilies(GraphConfig(), None, engine_sizes, has_draft=True).managers)


def numbers() -> dict[str, int]:
    """Each number by what it counts."""
    product = texts("specdec", "graphs", "weights")
    run = run_by_a_request(product)
    functions = [each for item in product.items() for each in lengths_and_arguments(*item)]
    benchmarks = subprocess.check_output(["git", "ls-files", "benchmarks"], cwd=ROOT, text=True)
    readmes = {each: (ROOT / each).read_text() for each in ("benchmarks/README.md", "README.md")}
    return {
        "product lines": num_lines(product),
        "product files": len(product),
        "test lines": num_lines(texts("tests")),
        "files in benchmarks/": len(benchmarks.splitlines()),
        **{f"lines of {path}": num_lines({path: text}) for path, text in readmes.items()},
        "files over 350 lines": sum(len(text.splitlines()) > 350 for text in product.values()),
        "functions over 60 lines": sum(length > 60 for length, _ in functions),
        "functions of over 8 arguments": sum(arguments > 8 for _, arguments in functions),
        "constants in scheduling/": sum(map(num_constants, texts("specdec/scheduling").values())),
        "files that say tree": sum(
            bool(re.search(r"\btrees?\b", text, re.I)) for text in texts("specdec").values()
        ),
        "files that a request runs": len(run),
        "their lines": num_lines(run),
        "graph families": num_families(),
        'docstrings that begin with "Of", "The same" or "As"': sum(
            len(re.findall(r'"""(?:Of|The same|As)\b', text)) for text in product.values()
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    is_json, found = parser.parse_args().json, numbers()
    lines = "\n".join(f"{value:>8,}  {name}" for name, value in found.items())
    print(json.dumps(found) if is_json else lines)


if __name__ == "__main__":
    main()
