"""How long does a draft take in a round: a block in one pass, or an EAGLE-3 head's levels?

    python -m scripts.bench_block qwen3-8b -k 7 --batch 1,64
    python -m scripts.bench_block qwen3-8b --kind dspark,eagle3 --json FILE

Weights are random, of a published model's sizes, and so are its heads (scripts/block_head.py).
Times are medians of greedy rounds in steady state, in milliseconds: `extend`, the draft's KV of the
step's rows, with the first level of an EAGLE or P-EAGLE head; `propose`, what it drafts then; the
whole round.
"""

import argparse
import tempfile
from pathlib import Path
from unittest import mock

from scripts.block_head import KINDS, write_block_head, write_parallel_head
from scripts.random_models import MODELS
from scripts.random_pair import draw, write_pair
from scripts.write_json import write_json
from specdec.bench.pair import EngineSpec, Pair, load_pair
from specdec.bench.report import table
from specdec.bench.timing import time_phases, time_rounds, tokens_needed
from specdec.start.speculation import Drafting


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--kind", default="dspark,dflash,dflash2,peagle,eagle3")
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=7)
    parser.add_argument("--batch", default="1,64")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the last line's JSON to a file too")
    args = parser.parse_args()
    args.kind, args.batch = args.kind.split(","), [int(n) for n in args.batch.split(",")]
    known = [*KINDS, "peagle", "eagle3"]
    if unknown := {*args.kind}.difference(known):
        parser.error(f"--kind {', '.join(unknown)}: give some of {', '.join(known)}")
    return args


def rows_of(pair: Pair, kind: str, args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure one draft at each number of requests."""
    K = args.num_speculative_tokens
    found = []
    for batch in args.batch:
        prompts = [pair.prompts[i % len(pair.prompts)] for i in range(batch)]
        spec = EngineSpec(
            drafting=Drafting(K),
            max_num_seqs=batch,
            max_tokens=max(map(len, prompts)) + tokens_needed(2 * args.rounds, K),
            max_model_len=args.max_model_len,
            request_sizes=(batch,) if pair.device.type == "cuda" else None,
            enforce_eager=pair.device.type != "cuda",
        )
        engine = pair.engine(spec)
        whole = time_rounds(engine, prompts, args.rounds)
        phases = time_phases(engine, prompts, args.rounds)
        extend, propose = (phases[name] or 0.0 for name in ("prefill_draft", "decode_draft"))
        times = {"draft_ms": extend + propose, "extend_ms": extend, "propose_ms": propose}
        found.append({"draft": kind, "K": K, "batch": batch, **times, "round_ms": whole.median})
        pair.drop(spec)
    return found


def main() -> None:
    args = parse_args()
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as out, mock.patch("weights.load.read_tensors", draw):
        write_pair(Path(out), args.model)
        for kind in args.kind:
            head = Path(out) / kind
            if kind in KINDS:
                write_block_head(head, kind, Path(out) / "target")
            elif kind == "peagle":
                write_parallel_head(head, Path(out) / "eagle3")
            pair = load_pair(str(Path(out) / "target"), str(head), args.device, "auto")
            found += rows_of(pair, kind, args)
    print(table(found))
    write_json("scripts.bench_block", {"model": args.model, "rows": found}, args.json)


if __name__ == "__main__":
    main()
