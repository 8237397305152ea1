"""What does sampling add to a round, by what its requests ask for?

    python -m scripts.sampling_rounds --target DIR/target --draft DIR/eagle3
    python -m scripts.sampling_rounds --target DIR/target --draft DIR/eagle3 --batches 1 | tail -1 | jq .

Rounds in steady state by the device's clock: the median and the middle 80 %, beside greedy rounds of the same engine.
Sampled texts differ from case to case, so rounds do not accept alike; their time does not depend on that.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from specdec.bench.pair import EngineSpec, Pair, load_pair
from specdec.bench.report import write_json
from specdec.bench.timing import Clock, Spread
from specdec.requests.params import SamplingParams
from specdec.requests.sampling_flags import SamplingFlags

WARMUP = 8
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
    parser.add_argument(
        "--json", type=Path, default=None, help="write the last line's JSON to a file too"
    )
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
            rows.append(
                {"batch": batch, "case": name, "round_ms": spread.median, "added_ms": added}
            )
            print(
                f"batch {batch:<4}{name:<18}{spread.median:>9.3f} ms ({spread.low:.3f} to {spread.high:.3f})"
                f"{added:>9.3f} ms added = {added / greedy:.1%}",
                flush=True,
            )
    on = torch.cuda.get_device_name(pair.device) if pair.device.type == "cuda" else "CPU"
    write_json("scripts.sampling_rounds", {**vars(given), "device": on, "rows": rows}, given.json)


def time_case(
    pair: Pair, batch: int, values: dict[str, float], given: argparse.Namespace
) -> Spread:
    """Milliseconds of a round of `batch` requests that ask for `values`."""
    prompts = (pair.prompts * -(-batch // len(pair.prompts)))[:batch]
    room = (given.num_rounds + WARMUP + 2) * (given.num_speculative_tokens + 1)
    longest = max(map(len, prompts)) + room
    spec = EngineSpec(
        num_speculative_tokens=given.num_speculative_tokens,
        max_num_seqs=batch,
        max_tokens=longest,
        max_model_len=longest,
        request_sizes=(batch,),
    )
    engine = pair.engine(spec)
    asked = {"temperature": 1.0, "seed": 1, "max_tokens": room, "ignore_eos": True} | values
    requests = engine.add_requests([(prompt, SamplingParams(**asked)) for prompt in prompts])
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    engine.drain()
    for request in requests:
        engine.runner.grow(engine.scheduler.reserve(request))
    flags, rows = (
        SamplingFlags.of_all(r.params.flags for r in requests),
        [r.row for r in engine.scheduler.running],
    )
    bounds = iter(
        range(max(r.num_tokens for r in requests) - 1, longest, given.num_speculative_tokens + 1)
    )
    try:
        return Clock(pair.device).repeat(
            lambda: engine.runner.run_round(rows, next(bounds), flags), given.num_rounds, WARMUP
        )
    finally:
        engine.abort_all()


if __name__ == "__main__":
    main()
