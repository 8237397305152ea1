"""Are tokens and logits the same for every K, batch and context, graph and eager, on a real pair?

Generates from the pair's prompts for every setting, and at contexts around tile and split borders
(prompts joined); compares tokens, and a hash of the logits at every emitted position, with eager
plain decoding one request at a time. Of trees only tokens are compared. Prints a line per setting
and a last line of JSON; exit code 1 if anything differs.

    python -m scripts.exact_matrix DIR/target --draft DIR/eagle3 --trees 16x6x4,32x8x8
    python -m scripts.exact_matrix demo --draft demo -k 0,3 --batch 1,4 --num-prompts 4
"""

import argparse
import itertools
import json
import sys

from specdec.bench.pair import EngineSpec, Pair, joined, load_pair
from specdec.cli.readers import tree
from specdec.engine import Engine
from specdec.sizes import MAX_TREE_REQUESTS, TreeShape
from specdec.start.speculation import Drafting
from tests.logit_hashes import Found, equals, run

Drafts = int | TreeShape  # of a round: a chain's length, or a tree
MANY, LONG = 8, 9000  # requests at a time; of contexts of LONG tokens or more, two
CONTEXTS = "63,64,65,1023,1024,1025,1152,4096,4097,8191,8192,8193,16384,32000"


def engine_of(pair: Pair, drafts: Drafts, batch: int, length: int, is_eager: bool) -> Engine:
    is_chain = isinstance(drafts, int)
    drafting = Drafting(drafts) if is_chain else Drafting(drafts.num_levels, tree=drafts)
    built = {"drafting": drafting, "enforce_eager": is_eager, "has_prefill_graphs": True}
    sizes = {"max_num_seqs": batch, "max_tokens": length, "max_model_len": max(length, 1024)}
    return pair.engine(EngineSpec(**built, **sizes), keep=0)


def settings(args: argparse.Namespace, is_cpu: bool) -> list[tuple]:
    """List drafts, batch, the engine's largest batch, whether it is eager, and the context.

    Context 0: the prompts themselves, for which the largest batch runs eagerly too.
    """
    found: list[tuple] = []
    for is_eager, drafts in itertools.product((False, True), (*args.k, *args.trees)):
        most = max(args.batch) if isinstance(drafts, int) else MAX_TREE_REQUESTS
        batches = sorted({min(batch, most) for batch in args.batch})
        found += [(drafts, B, batches[-1], is_eager, 0) for B in batches[-is_eager:]]
    for is_eager, drafts in itertools.product((True, False)[: 2 - is_cpu], (0, 3, 5, *args.trees)):
        sizes = itertools.product(args.contexts, (1, MANY))
        found += [(drafts, batch, MANY, is_eager, length) for length, batch in sizes]
    return found


def rows(pair: Pair, args: argparse.Namespace) -> list[dict[str, object]]:
    """Run every setting, and compare it with eager plain decoding one request at a time."""
    prompts, is_cpu = pair.prompts[: args.num_prompts], pair.device.type == "cpu"
    longest = max(map(len, prompts)) + args.max_tokens
    engine, rows = engine_of(pair, 0, 1, longest, True), []
    found, _ = run(engine, prompts[: args.num_alone], 1, args.max_tokens)
    known: dict[tuple[int, bool], Found] = {(0, False): found}  # by context; True: all at once
    for drafts, batch, largest, is_eager, length in settings(args, is_cpu):
        some = prompts if batch > 1 else prompts[: args.num_alone]
        if length:
            num = 2 if batch == 1 or length >= LONG else MANY
            some = [joined(pair.prompts, length, i) for i in range(num)]
        room = max(args.contexts) + 64 if length else longest
        engine = engine_of(pair, drafts, largest, room, is_eager)
        num_tokens = args.context_tokens if length else args.max_tokens
        found, mean = run(engine, some, batch, num_tokens)
        # the first ones have run alone, the others beside each other at least
        compared = [known.setdefault((length, is_all), found) for is_all in (False, batch > 1)]
        same = all(equals(found, each) for each in compared)
        replays = sum(each.replays.total() for each in engine.runner.graphs.counters().values())
        assert (is_eager or is_cpu) == (replays == 0), f"{is_eager=}, {replays} replays"
        tree_of = None if isinstance(drafts, int) else drafts
        shape = tree_of and f"{tree_of.num_rows}x{tree_of.num_levels}x{tree_of.top_k}"
        row = {"k": drafts if tree_of is None else tree_of.num_levels, "tree": shape}
        row |= {"batch": batch, "how": "eager" if is_eager or is_cpu else "graph"}
        row |= {"what": f"context {length}" if length else "", "prompts": len(some)}
        rows.append(row | {"same": same, "mean": mean})
        print(*(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    return rows


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--draft", required=True)
    parser.add_argument("-k", type=numbers, default=numbers("0,1,3,5,7"))
    parser.add_argument("--trees", default="", help="rows x levels x top_k: 16x6x4,32x8x8")
    parser.add_argument("--batch", type=numbers, default=numbers("1,8,32,48"))
    parser.add_argument("--contexts", type=numbers, default=numbers(CONTEXTS))
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--num-alone", type=int, default=48, help="prompts that run one at a time")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--context-tokens", type=int, default=16, help="after a joined prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    args.trees = [tree("--trees", part) for part in args.trees.split(",") if part]
    return args


def main() -> None:
    args = parse_args()
    found = rows(load_pair(args.target, args.draft, args.device, args.dtype), args)
    all_same = all(row["same"] for row in found)
    print(json.dumps({"all_same": all_same, "rows": found}))
    sys.exit(0 if all_same else 1)


if __name__ == "__main__":
    main()
