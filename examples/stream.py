"""Text as it is written: how much does each round of speculation bring?

python examples/stream.py
python examples/stream.py --target DIR --draft DIR --prompt "Once upon a time"
"""

import argparse

from specdec import LLM, SamplingParams

PROMPT = "class Config(object):\n    def __init__(self, name, path):\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    llm = LLM(args.target, {"model": args.draft, "num_speculative_tokens": 5})
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    print(args.prompt, end="")
    pieces = []
    for piece in llm.stream(args.prompt, params):
        print(piece.text, end="", flush=True)
        pieces.append(len(piece.token_ids))
    print(f"\n\ntokens of each piece: {' '.join(map(str, pieces))}")


if __name__ == "__main__":
    main()
