"""Are tokens the same on every number of GPUs, for every K, tree, batch and temperature?

Generates from the pair's prompts for every setting on each number of GPUs, and compares tokens with
those of the first number, plain, one request at a time. In each step the ranks compare their
results (SPECDEC_DEBUG=1), and what they exchange is poisoned before. Prints a line per setting and
a last line of JSON; exit code 1 if anything differs.

    python -m scripts.exact_ranks demo --draft demo --ranks 1,2,4 --trees 16x6x4
    python -m scripts.exact_ranks DIR/target --draft DIR/eagle3 --ranks 1,2 --num-alone 8
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from scripts.exact_matrix import numbers
from specdec.bench.pair import EngineSpec, Pair, load_pair
from specdec.bench.serving import GREEDY, generate, greedy
from specdec.cli.readers import tree
from specdec.sizes import MAX_TREE_REQUESTS
from specdec.start.speculation import AUTO_TREE, MOST_LEVELS, Drafting

SEED = 7
Rows = list[dict[str, object]]


def draftings(args: argparse.Namespace, is_cpu: bool) -> Iterator[Drafting]:
    """List plain decoding, chains, trees, and as many drafts as pay, which a CPU cannot tell."""
    yield from (Drafting(K) for K in dict.fromkeys((0, *args.k)))
    yield from (Drafting(shape.num_levels, tree=shape) for shape in args.trees)
    if not is_cpu:
        yield Drafting(MOST_LEVELS, True, AUTO_TREE, confidence_threshold=None)


def rows(pair: Pair, args: argparse.Namespace, known: dict[tuple[float, int], list[int]]) -> Rows:
    """Run every setting on one number of GPUs. known: tokens by temperature and prompt."""
    prompts, found = pair.prompts[: args.num_prompts], []
    longest = max(map(len, prompts)) + args.max_tokens
    for drafting in draftings(args, pair.device.type == "cpu"):
        most = MAX_TREE_REQUESTS if drafting.has_fixed_tree else max(args.batch)
        spec = EngineSpec(
            drafting=drafting,
            max_num_seqs=min(most, max(args.batch)),
            max_tokens=longest,
            max_model_len=max(longest, 1024),
            has_prefill_graphs=True,
        )
        engine = pair.engine(spec, keep=0)
        for batch in sorted({min(batch, most) for batch in args.batch}):
            for temperature in args.temperatures:
                some, began, differ = prompts[: args.num_alone if batch == 1 else None], 0.0, []
                began = time.monotonic()
                for first in range(0, len(some), batch):
                    params = replace(GREEDY, temperature=temperature, seed=SEED)
                    jobs = greedy(some[first : first + batch], args.max_tokens, params)
                    for i, request in enumerate(generate(engine, jobs), first):
                        tokens = known.setdefault((temperature, i), request.token_ids)
                        differ += [i] * (tokens != request.token_ids)
                row = {"ranks": pair.config.tensor_parallel_size, "drafts": drafting.name}
                row |= {"batch": batch, "temperature": temperature, "prompts": len(some)}
                row |= {"seconds": round(time.monotonic() - began, 1), "differ": differ}
                print(*(f"{name}={value}" for name, value in row.items()), flush=True)
                found.append(row)
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--ranks", type=numbers, default=numbers("1,2"))
    parser.add_argument("-k", type=numbers, default=numbers("0,5"))
    parser.add_argument("--trees", default="", help="rows x levels x top_k: 16x6x4,32x8x8")
    parser.add_argument("--batch", type=numbers, default=numbers("1,8,64"))
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--num-alone", type=int, default=48, help="prompts that run one at a time")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--whole-draft", action="store_true", help="on each GPU")
    parser.add_argument("--unchecked", action="store_true", help="ranks do not compare results")
    args = parser.parse_args()
    args.trees = [tree("--trees", part) for part in args.trees.split(",") if part]
    args.temperatures = [float(part) for part in args.temperatures.split(",")]
    return args


def main() -> None:
    args = parse_args()
    if not args.unchecked:
        os.environ["SPECDEC_DEBUG"] = "1"
    known: dict[tuple[float, int], list[int]] = {}
    found: Rows = []
    for size in args.ranks:
        sizes = {"tensor_parallel_size": size}
        sizes |= {"draft_tensor_parallel_size": 1} if args.whole_draft else {}
        pair = load_pair(args.target, args.draft, args.device, args.dtype, **sizes)
        found += rows(pair, args, known)
        pair.close()
    all_same = not any(row["differ"] for row in found)
    print(json.dumps({"all_same": all_same, "rows": found}))
    sys.exit(0 if all_same else 1)


if __name__ == "__main__":
    main()
