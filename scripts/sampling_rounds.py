"""What does each sampling parameter add to the time of a round?

    python -m scripts.sampling_rounds --target DIR/target --draft DIR/eagle3
    python -m scripts.sampling_rounds --batches 1 | tail -1 | jq .

Rounds in steady state by the device's clock: the median and the middle 80 %, beside greedy rounds
of the same engine. Sampled texts differ from case to case, so different numbers of drafts are
accepted; the time of a round does not depend on that.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from specdec.bench.pair import EngineSpec, Pair, load_pair
from specdec.bench.report import write_json
from specdec.bench.rounds import time_rounds, tokens_needed
from specdec.bench.timing import Spread

CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "T=1": {},
    "T=1 top_k=50": {"top_k": 50},
    "T=1 top_p=0.9": {"top_p": 0.9},
    "T=1.5 top_p=0.99": {"temperature": 1.5, "top_p": 0.99},
    "T=1 all": {"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
}


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-speculative-tokens", "-k", type=int, default=5)
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--num-rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the last line's JSON to a file too")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    given = parse_args(args)
    pair = load_pair(given.target, given.draft, given.device, given.dtype)
    rows = []
    for batch in map(int, given.batches.split(",")):
        greedy = 0.0
        for name, values in CASES.items():
            spread = time_case(pair, batch, values, given)
            greedy = greedy or spread.median
            added = spread.median - greedy
            figures = {"round_ms": spread.median, "added_ms": added}
            rows.append({"batch": batch, "case": name} | figures)
            times = f"{spread.median:>9.3f} ms ({spread.low:.3f} to {spread.high:.3f})"
            share = f"{added:>9.3f} ms added = {added / greedy:.1%}"
            print(f"batch {batch:<4}{name:<18}{times}{share}", flush=True)
    on = torch.cuda.get_device_name(pair.device) if pair.device.type == "cuda" else "CPU"
    write_json("scripts.sampling_rounds", {**vars(given), "device": on, "rows": rows}, given.json)


def time_case(
    pair: Pair, batch: int, values: dict[str, float], given: argparse.Namespace
) -> Spread:
    """Milliseconds of a round of `batch` requests with these parameters."""
    prompts = (pair.prompts * -(-batch // len(pair.prompts)))[:batch]
    room = tokens_needed(given.num_rounds, given.num_speculative_tokens)
    spec = EngineSpec(
        num_speculative_tokens=given.num_speculative_tokens,
        max_num_seqs=batch,
        max_model_len=max(map(len, prompts)) + room,
        request_sizes=(batch,),
    )
    sampling = {"temperature": 1.0, "seed": 1} | values
    return time_rounds(pair.engine(spec), prompts, given.num_rounds, **sampling)


if __name__ == "__main__":
    main()
