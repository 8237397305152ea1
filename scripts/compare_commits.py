"""Is this commit as fast as another one? Both run on one card, in turns: A B A B A B.

    git archive OTHER | tar -x -C /tmp/other
    python -m scripts.compare_commits /tmp/other --target DIR/target --draft DIR/eagle3 --json F

A is the other tree, B this one. Each runs in a process of its own, and both stay loaded; they start
one after the other, the first engine of each with an empty cache of kernels. B / A is the median of
all turns, of speeds; A / A the slowest turn of A over its fastest. Tokens must be equal.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import chain, cycle, islice, product
from pathlib import Path
from typing import Any

from weights.demo import demo_prompts

Row = dict[str, Any]
AUTO, CHAINS = {"num_speculative_tokens": "auto"}, {"adaptive": False, "num_speculative_tokens": 5}
TREE = {"num_speculative_tokens": 6, "top_k": 4, "num_draft_tokens": 15}
# drafts, how many requests at a time, and prompts of how many tokens besides
ENGINES: dict[str, tuple[Row, list[int], list[int]]] = {
    "auto": (AUTO, [1, 2, 4, 8, 16, 64, 256], [64, 512]),
    "chains": (CHAINS, [1, 8], []),
    "tree": (TREE, [1, 8], []),
    "long": (AUTO, [1], [2048, 16384]),
}


class Side:  # a process with the engine of one tree
    def __init__(self, tree: Path, cache: str) -> None:
        env = os.environ | {"PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("asked_engine.py"))],
            cwd=tree,
            env=env | {"TRITON_CACHE_DIR": cache},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, question: Row) -> Row:
        pipes: Any = self._process
        pipes.stdin.write(json.dumps(question).encode() + b"\n")
        pipes.stdin.flush()
        return json.loads(pipes.stdout.readline() or sys.exit("a process ended: see above"))


def cells(
    texts: list[list[int]], batches: list[int], lengths: list[int], answer: int
) -> dict[str, Row]:
    """List what is measured, by name: requests in a closed loop."""

    def prompts(count: int, length: int) -> list[list[int]]:
        turned = (chain(*texts[i % len(texts) :], *texts[: i % len(texts)]) for i in range(count))
        return [list(islice(cycle(each), length)) for each in turned]

    found = {}
    for B, T in product(batches, (0.0, 0.8)):
        one = {"prompts": prompts(max(8, 2 * B), 96), "batch": B, "temperature": T}
        found[f"{B} at a time, T = {T}"] = one | {"answer": answer}
    for length in lengths:
        one = {"prompts": prompts(5, length), "batch": 1, "temperature": 0.0}
        found[f"first token after {length}"] = one | {"answer": 1}
        if length >= 2048:
            found[f"{answer} tokens after {length}"] = one | {"answer": answer}
    return found


def compared(turns: list[list[Row]]) -> Row:
    """Compare the answers of A and B, turn by turn."""
    A, B = ([turn[i]["speed"] for turn in turns] for i in (0, 1))
    ratio = statistics.median(b / a for a, b in zip(A, B, strict=True))
    is_same = len({each["tokens"] for turn in turns for each in turn}) == 1
    figures = {"A": statistics.median(A), "B": statistics.median(B)}
    return figures | {"B / A": ratio, "A / A": min(A) / max(A), "same": is_same}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("other", type=Path, help="a directory with the other commit's files")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[*ENGINES])
    parser.add_argument("--most", type=int, default=256, help="requests at a time")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--answer", type=int, default=128, help="tokens")
    parser.add_argument("--json", type=Path, help="write all rows to a file too")
    args = parser.parse_args()
    beside = Path(args.target).parent / "prompts.json"
    texts: Any = json.loads(beside.read_text()) if beside.is_file() else demo_prompts()
    rows, trees = [], (args.other.resolve(), Path(__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory() as A, tempfile.TemporaryDirectory() as B:
        sides = [Side(tree, cache) for tree, cache in zip(trees, (A, B), strict=True)]
        for name in args.engines:
            drafts, batches, lengths = ENGINES[name]
            batches, longest = [most for most in batches if most <= args.most], max([512, *lengths])
            model = {"model": args.target, "speculative_config": {"model": args.draft, **drafts}}
            model |= {"max_num_seqs": max(batches), "max_model_len": longest + args.answer + 64}
            model["num_kv_blocks"] = (max(batches) * (args.answer + 256) + longest) // 64
            starts = [side.ask(model | {"enable_prefix_caching": False}) for side in sides]
            found = {what: {"A": a, "B": starts[1][what]} for what, a in starts[0].items()}
            for what, cell in cells(texts["prompts"], batches, lengths, args.answer).items():
                turns = [[side.ask(cell) for side in sides] for _ in range(1 + args.turns)]
                found[what] = compared(turns[1:])
            for what, row in found.items():
                rows.append({"engine": name, "what": what} | row)
                print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
