"""How fast is a layer of experts, and which tiles are fastest? Prints each row once it is measured.

    python -m scripts.bench_experts                       # published sizes, as specdec bench
    python -m scripts.bench_experts --models qwen --rows 1,8,64
    python -m scripts.bench_experts --search --rows 1,8,64,256,2048 --json FILE

--search: expert_search.py, on a GPU; at the end the fastest tiles of each way.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch

from scripts.expert_search import best_of_each, search
from specdec.bench.experts import PUBLISHED, ROWS, TINY, layer_rows
from specdec.bench.timing import measure_bandwidth


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help="parts of their names with commas; default: all")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--search", action="store_true", help="time all candidates, on a GPU")
    parser.add_argument("--json", type=Path, help="write all rows to a file, after each one")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = PUBLISHED if device.type == "cuda" else TINY
    parts = args.models.lower().split(",") if args.models else [""]
    models = [each for each in known if any(part in each.model.lower() for part in parts)]
    rows = [int(T) for T in args.rows.split(",")]
    if args.search and device.type != "cuda":
        raise SystemExit("--search needs a GPU: tiles change no time elsewhere")
    if args.search:
        found = [search(sizes, T, device) for sizes in models for T in rows]
    else:
        bandwidth = measure_bandwidth(device)
        print(f"{bandwidth / 1e9:.0f} GB/s", flush=True)
        found = [layer_rows(sizes, rows, device, bandwidth) for sizes in models]
    seen = []
    for row in itertools.chain.from_iterable(found):
        seen.append(row)
        print(json.dumps(row), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(seen, indent=1) + "\n")
    if args.search:
        print("\n".join(best_of_each(seen)))


if __name__ == "__main__":
    main()
