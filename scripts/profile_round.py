"""Which kernels does a round run, for how long, in which phase, and when is the device idle?

python -m scripts.profile_round /tmp/8b/target --draft /tmp/8b/eagle3 -k 5
python -m scripts.profile_round ... --batch 8 --tree 6x4x3 --context 300
nsys profile python -m scripts.profile_round ...      # the phases are NVTX ranges too
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from scripts.round_profile import RANGE, RoundProfile, read_profile
from scripts.write_json import write_json
from specdec.bench.pair import EngineSpec, load_pair
from specdec.bench.report import table
from specdec.bench.timing import WARMUP, steady, tokens_needed, wrapped
from specdec.cli.readers import tree
from specdec.engine import Engine
from specdec.start.speculation import Drafting
from specdec.step import PHASES


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


def profile_rounds(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> RoundProfile:
    """Rounds in steady state under torch.profiler; on a CPU its operators stand for kernels."""
    is_gpu = engine.runner.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_gpu
    with steady(engine, prompts, count + WARMUP) as run_round:

        def run(num_rounds: int) -> None:
            for _ in range(num_rounds):
                run_round()
            if is_gpu:
                torch.cuda.synchronize()

        run(WARMUP)
        with wrapped(engine.runner.acts, PHASES, named_range):
            with profile(activities=activities):
                run(WARMUP)  # the profiler's own first steps are slow
            with profile(activities=activities) as recorded:
                run(count)
    return read_profile(list(recorded.events()), count, is_gpu)


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """A range for torch.profiler and for NVTX."""
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext()
    with nvtx, record_function(RANGE + name):
        yield


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
        drafting=Drafting(K, tree=args.tree),
        max_num_seqs=args.batch,
        max_tokens=max(map(len, prompts)) + tokens_needed(args.rounds + WARMUP, most),
        max_model_len=args.max_model_len,
        request_sizes=(args.batch,) if pair.device.type == "cuda" else None,
        enforce_eager=args.enforce_eager,
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
