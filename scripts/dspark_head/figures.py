"""What does the engine accept of a DSpark head for the bundled target, in chains and in trees?

    python -m scripts.dspark_head.figures OUT                   # float32, without graphs
    python -m scripts.dspark_head.figures OUT --num-prompts 2 --num-tokens 32 -k 4

Prints for a chain of -k drafts, and for a tree of as many levels, rounds and acceptance length at
temperature 0 and 1 from the bundled prompts. Tokens are the same for both, or it fails.
"""

import argparse
from pathlib import Path

from specdec import LLM, SamplingParams
from specdec.requests.stats import SpeculationStats
from weights.demo import demo_prompts


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("head", type=Path)
    parser.add_argument("--num-speculative-tokens", "-k", type=int, default=6)
    parser.add_argument("--top-k", type=int, default=4, help="of trees")
    parser.add_argument("--num-draft-tokens", type=int, default=16, help="of trees")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--num-tokens", type=int, default=160)
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def main() -> None:
    given = parse_args()
    prompts = demo_prompts()["prompts"][: given.num_prompts]
    tree = {"top_k": given.top_k, "num_draft_tokens": given.num_draft_tokens}
    found: dict[float, tuple[list[list[int]], float]] = {}
    for kind, options in (("chain", {"adaptive": False}), ("tree", tree)):
        draft = {"model": given.head, "num_speculative_tokens": given.num_speculative_tokens}
        with LLM(
            "demo",
            draft | options,
            device=given.device,
            dtype="float32",
            enforce_eager=True,
            max_num_seqs=len(prompts),
        ) as llm:
            for temperature in (0.0, 1.0):
                params = SamplingParams(
                    temperature=temperature, seed=0, max_tokens=given.num_tokens, ignore_eos=True
                )
                outputs = llm.generate(prompts, params, use_tqdm=False)
                stats = SpeculationStats.merged([output.stats for output in outputs])
                tokens = [output.outputs[0].token_ids for output in outputs]
                length = 1 + stats.num_accepted_tokens / stats.num_rounds
                of_chain, chain_length = found.setdefault(temperature, (tokens, length))
                if tokens != of_chain:
                    raise SystemExit(f"temperature {temperature}: a tree changes tokens")
                ratio = f"{length / chain_length:.3f} of the chain's"
                print(
                    f"{kind}, temperature {temperature}: {stats.num_rounds:,} rounds, at "
                    f"{stats.num_accepted_per_position}, {length:.3f} a round, {ratio}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
