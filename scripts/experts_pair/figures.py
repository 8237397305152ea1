"""What does a pair accept, by naive recomputation in float32, and how well does it draft?

    python -m scripts.experts_pair.figures weights/demo_experts
    python -m scripts.experts_pair.figures OUT --num-prompts 3 --num-tokens 48 -k 3

Greedy, from the bundled prompts. Prints for each K a row of the pair's README and a line of FIGURES
in tests/e2e/test_demo_experts.py.
"""

import argparse
from pathlib import Path

from scripts.experts_pair.eagle3 import TAPS
from tests import naive_eagle
from tests.reference import Reference
from weights.demo import demo_prompts


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", type=Path)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--num-tokens", type=int, default=160)
    parser.add_argument("-k", default="5,3", help="drafts a round, with commas")
    return parser.parse_args()


def main() -> None:
    given = parse_args()
    target = Reference(given.pair / "target")
    cfg, weights = naive_eagle.read_draft(given.pair / "eagle3", TAPS)
    weights = naive_eagle.borrow(cfg, weights, target.weights)
    prompts = demo_prompts()["prompts"][: given.num_prompts]
    for K in map(int, given.k.split(",")):
        runs = [
            naive_eagle.generate(target, cfg, weights, prompt, given.num_tokens, K)
            for prompt in prompts
        ]
        num_rounds = sum(len(run.num_accepted) for run in runs)
        at = [sum(counts) for counts in zip(*(run.num_accepted_at(K) for run in runs), strict=True)]
        mean = 1 + sum(at) / num_rounds
        shown = " ".join(map(str, at))
        print(
            f"| K = {K}, {len(prompts)} prompts | {num_rounds:,} | {shown} | {mean:.3f} |",
            flush=True,
        )
        print(f"    ({K}, {num_rounds}, {at}),", flush=True)


if __name__ == "__main__":
    main()
