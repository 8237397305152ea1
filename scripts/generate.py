"""What does the Python API look like in use? Several prompts at once, and their statistics.

python -m scripts.generate [PROMPT ...] [--target DIR] [--draft DIR] [-k K]

python -m scripts.generate "def fibonacci(n):" "import os"
python -m scripts.generate --draft demo/eagle1 -k 2 "class Stack:"
"""

import argparse
import json

from specdec import LLM, SamplingParams, SpeculativeConfig


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "prompts", nargs="*", default=["def fibonacci(n):", "class Stack:\n    def push(self"]
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    llm = LLM(args.target, SpeculativeConfig(args.draft, args.num_speculative_tokens))
    outputs = llm.generate(
        args.prompts, SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    )
    for output in outputs:
        length = output.stats.mean_acceptance_length
        print(f"--- acceptance length {'none' if length is None else format(length, '.2f')}")
        print(f"{output.prompt}{output.outputs[0].text}")
    print(json.dumps(LLM.run_stats(outputs).as_dict()))


if __name__ == "__main__":
    main()
