"""How long do drafts take in a round, and how fast is a pair: blocks, P-EAGLE, an EAGLE-3 chain?

    python -m scripts.bench_block qwen3-8b -k 7 --batch 1,8,64 --kind dspark,dflash --json FILE
    python -m scripts.bench_block qwen3-8b -k 3,5 --oracle 0.8,0.6,0.5 --oracle eagle3=0.7,0.4

The suite drafts of `specdec bench`, with a head of each kind in turn. Weights are random, of a
published model's sizes, and so are its heads (scripts/block_head.py): drafts hold by luck alone, or
as often as --oracle says, in chains of at most as many drafts as it has rates. Each row is printed,
and saved to the file, as soon as it is measured.
"""

import argparse
import json
import tempfile
from pathlib import Path
from unittest import mock

from scripts.block_head import KINDS, write_block_head, write_parallel_head
from scripts.random_models import MODELS
from scripts.random_pair import draw, write_pair
from scripts.write_json import save_json, write_json
from specdec.bench.bench import Bench
from specdec.bench.drafts import Plain, draft_rows
from specdec.bench.options import BenchOptions
from specdec.bench.pair import card, load_pair
from specdec.bench.report import Row, table
from specdec.bench.timing import measure_bandwidth
from specdec.cli.bench import rounded
from weights.load import load_eagle


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--kind", default="dspark,dflash,dflash2,peagle,eagle3")
    parser.add_argument("-k", "--num-speculative-tokens", type=integers, default="7")
    parser.add_argument("--batch", type=integers, default="1,64")
    parser.add_argument("--oracle", type=oracle, action="append", default=[], help="[KIND=]RATES")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the last line's JSON to a file too")
    args = parser.parse_args()
    args.kind, args.oracle = args.kind.split(","), dict(args.oracle)
    known = [*KINDS, "peagle", "eagle3"]
    if unknown := ({*args.kind, *args.oracle} - {""}).difference(known):
        parser.error(f"--kind {', '.join(unknown)}: give some of {', '.join(known)}")
    try:
        args.options = {kind: options_of(kind, args) for kind in args.kind}
    except ValueError as error:
        parser.error(str(error))
    return args


def integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def oracle(text: str) -> tuple[str, list[float]]:
    """Read "0.8,0.6", for all kinds, or "eagle3=0.7,0.5"."""
    kind, _, rates = text.rpartition("=")
    return kind, [float(rate) for rate in rates.split(",")]


def options_of(kind: str, args: argparse.Namespace) -> BenchOptions:
    rates = args.oracle.get(kind, args.oracle.get(""))
    most = max(args.num_speculative_tokens) if rates is None else len(rates)
    return BenchOptions(
        ks=sorted({min(K, most) for K in args.num_speculative_tokens}),
        batches=args.batch,
        oracle=rates,
        num_prompts=args.num_prompts,
        max_tokens=args.max_tokens,
        num_rounds=args.rounds,
        max_model_len=args.max_model_len,
    )


def main() -> None:
    args = parse_args()
    rows: list[Row] = []
    plain: Plain = {}
    with tempfile.TemporaryDirectory() as out, mock.patch("weights.load.read_tensors", draw):
        target = Path(out) / "target"
        write_pair(Path(out), args.model)
        pair = load_pair(str(target), None, args.device, "auto")
        bench = Bench(pair, measure_bandwidth(pair.device), BenchOptions())
        found = {"model": args.model, "card": rounded(card(pair, bench.bandwidth))}
        found |= {"suites": {"drafts": rows}}
        for kind, bench.options in args.options.items():
            pair.drop()
            head = head_of(kind, Path(out))
            pair.eagle = load_eagle(head, pair.target, device=pair.device, progress=False)
            bench.check_draft()
            for K in [K for K in bench.ks if K > 0 or not plain]:
                for row in draft_rows(bench, K, plain):
                    rows.append({name: rounded(value) for name, value in row.items()})
                    print(json.dumps(rows[-1]), flush=True)
                    save_json("scripts.bench_block", found, args.json)
    print(table(rows))
    write_json("scripts.bench_block", found, args.json)


def head_of(kind: str, pair: Path) -> Path:
    """Write a head of this kind beside the pair, if there is none."""
    head = pair / kind
    if kind in KINDS:
        write_block_head(head, kind, pair / "target")
    elif kind == "peagle":
        write_parallel_head(head, pair / "eagle3")
    return head


if __name__ == "__main__":
    main()
