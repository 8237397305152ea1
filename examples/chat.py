"""A conversation of several turns, each answered with what was said before.

python examples/chat.py
python examples/chat.py --target DIR --draft DIR "What is a monad?" "And in one sentence?"
"""

import argparse

from specdec import LLM, SamplingParams

TURNS = [
    "class Stack(object):\n    def __init__(self):\n        self.items = []\n\n"
    "    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):",
    "class Queue(object):\n    def __init__(self):",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("turns", nargs="*", default=TURNS)
    args = parser.parse_args()
    llm = LLM(args.target, {"model": args.draft})
    params = SamplingParams(temperature=0.0, max_tokens=32)
    messages = []
    for turn in args.turns:
        messages.append({"role": "user", "content": turn})
        output = llm.chat(messages, params, use_tqdm=False)[0]
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        print(f"> {turn}\n{output.outputs[0].text}")
        stats = output.stats
        print(f"({stats.num_cached_tokens} of {stats.num_prompt_tokens} prompt tokens cached)")


if __name__ == "__main__":
    main()
