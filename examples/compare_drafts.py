"""Which draft pays most for a target? Tokens per round of every draft and K, on your own prompts.

python examples/compare_drafts.py
python examples/compare_drafts.py --target DIR --draft DIR --draft OTHER_DIR
"""

import argparse

from specdec import LLM, SamplingParams

PROMPTS = [
    "def fibonacci(n):\n",
    "import argparse\nimport json\n\n\ndef main():\n",
    "for name, value in sorted(counts.items()):\n",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", action="append", help="may be repeated; default: those of demo")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    texts = set()
    print(f"{'draft':<16}{'K':>3}{'tokens per round':>18}{'accepted of drafted':>21}")
    for draft in args.draft or ["demo/eagle3", "demo/eagle1", "demo-dspark"]:
        for K in (1, 3, 5):
            llm = LLM(args.target, {"model": draft, "num_speculative_tokens": K, "adaptive": False})
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            stats = LLM.run_stats(outputs)
            texts.add(tuple(output.outputs[0].text for output in outputs))
            rate = stats.draft_acceptance_rate
            print(f"{draft:<16}{K:>3}{stats.mean_acceptance_length:>18.2f}{rate:>20.0%}")
    print(f"all drafts gave the same texts: {len(texts) == 1}")


if __name__ == "__main__":
    main()
