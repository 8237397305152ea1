"""Which kernels does a round run, for how long, in which phase, and when is the device idle?

python -m scripts.profile_round [TARGET] [--draft DIR] [-k 5] [--batch 1] [--rounds 10]

python -m scripts.profile_round /tmp/8b/target --draft /tmp/8b/eagle3 -k 5
python -m scripts.profile_round ... --batch 8 --tree 6x4x3 --context 300
nsys profile python -m scripts.profile_round ...      # the phases are NVTX ranges too
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from specdec.bench.pair import EngineSpec, load_pair
from specdec.bench.profile import profile_rounds
from specdec.bench.report import table, write_json
from specdec.bench.rounds import WARMUP, tokens_needed
from specdec.cli.readers import tree


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", default="demo")
    parser.add_argument("--draft", default=None, help='default: "demo" for the target "demo"')
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--tree", help="rows x levels x top_k, as in 16x6x4; in place of -k")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, help="tokens of each prompt; default: its own")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--top", type=int, default=60, help="lines of the table; the JSON has all")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json", type=Path, help="write the last line's JSON to a file too")
    args = parser.parse_args()
    args.draft = args.draft or ("demo" if args.target == "demo" else None)
    if args.tree is not None:
        if args.draft is None:
            parser.error(f"--tree {args.tree}: needs --draft")
        try:
            args.tree = tree("--tree", args.tree)
        except ValueError as error:
            parser.error(str(error))
    return args


def main() -> None:
    args = parse_args()
    pair = load_pair(args.target, args.draft, args.device, args.dtype)
    K = most = args.num_speculative_tokens if args.draft else 0
    if args.tree is not None:
        K, most = args.tree.num_levels, args.tree.num_nodes
    prompts = [pair.prompts[i % len(pair.prompts)] for i in range(args.batch)]
    if args.context is not None:
        prompts = [(each * (args.context // len(each) + 1))[: args.context] for each in prompts]
    spec = EngineSpec(
        num_speculative_tokens=K,
        max_num_seqs=args.batch,
        max_tokens=max(map(len, prompts)) + tokens_needed(args.rounds + WARMUP, most),
        max_model_len=args.max_model_len,
        request_sizes=(args.batch,) if pair.device.type == "cuda" else None,
        enforce_eager=args.enforce_eager,
        tree=args.tree,
    )
    found = profile_rounds(pair.engine(spec), prompts, args.rounds)
    num_launches = sum(found.launches.values())
    shape = args.tree
    of_trees = "" if shape is None else f", trees of {shape.num_rows} rows, top_k = {shape.top_k}"
    print(f"K = {K}{of_trees}, batch {args.batch}, per round:")
    print(table(found.kernels[: args.top]))
    print(f"kernels {found.num_kernels:.1f}; launches {num_launches:.1f}: {found.launches}")
    print(f"busy {found.busy_us:.1f} us of {found.span_us:.1f} us; idle for {found.gap_share:.1%}")
    print("idle us: " + ", ".join(f"{name} {us:.1f}" for name, us in found.gaps_us.items()))
    what = {"num_speculative_tokens": K, "tree": shape and asdict(shape), "batch": args.batch}
    whole = what | {"context": args.context} | asdict(found)
    write_json("scripts.profile_round", whole, args.json)


if __name__ == "__main__":
    main()
