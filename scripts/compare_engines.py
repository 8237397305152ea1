"""How fast is an engine on the work of the published comparison? One engine a process.

    python -m scripts.compare_engines ours --target DIR/target --draft DIR/eagle3 --batch 8 --json A
    python -m scripts.compare_engines vllm --target DIR/target --draft DIR/eagle3 --batch 8 --json B
    python -m scripts.compare_engines ours --batch 2 --quick --options '{"device": "cpu"}'

The engine (ours, vllm or sglang) has room for --batch requests and is asked through its public
offline class, without a prefix cache. In tokens per second: decode: tokens after each first one
over the whole time, the better of two runs; sampled: the same at temperature 0.8, top_p 0.95;
closed_loop: a call of nine generations of requests less a call of the first, whose ends are
staggered, so that what begins and ends a loop cancels; context: 96 tokens after long prompts, less
the prompts' time. first_token_ms: a call for one token, the median of five.
"""

import argparse
import json
import statistics
import time
from itertools import chain, cycle, islice
from pathlib import Path

from scripts.peers import PACKAGES, Generate, build, settings
from weights.demo import demo_prompts

FIRST, CONTEXTS = (128, 512, 2048, 8192, 16384), (4096, 16384)
GENERATIONS = 8  # of the loop's window
MOST_TOKENS = 131072  # of all prompts of a call


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engine", choices=PACKAGES)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo", help="an EAGLE-3 head")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    k = "default: ours as many as pay, others 5 up to 16 requests and 3 above"
    parser.add_argument("-k", "--num-speculative-tokens", type=int, help=k)
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments, as JSON")
    parser.add_argument("--max-model-len", type=int, default=16640)
    parser.add_argument("--quick", action="store_true", help="little work, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to a file too")
    args = parser.parse_args()
    default = "auto" if args.engine == "ours" else 5 if args.batch <= 16 else 3
    args.num_speculative_tokens = args.num_speculative_tokens or default
    args.max_model_len = 256 if args.quick else args.max_model_len
    return args


def measure(generate: Generate, texts: list[list[int]], args: argparse.Namespace) -> dict:
    """Run the whole protocol; give figures by name."""
    B = args.batch
    most, after, several = (6, 4, 2) if args.quick else (160, 96, max(8, B))

    def prompts(count: int, length: int | None = None) -> list[list[int]]:
        turned = [texts[i % len(texts) :] + texts[: i % len(texts)] for i in range(count)]
        if length is None:
            return [each[0] for each in turned]
        return [list(islice(cycle(chain(*each)), length)) for each in turned]

    def seconds(some: list[list[int]], counts: list[int], **sampling: float) -> float:
        began = time.perf_counter()
        generate(some, counts, **sampling)
        return time.perf_counter() - began

    def decode(**sampling: float) -> float:
        groups = [prompts(several)[i : i + B] for i in range(0, several, B)]
        runs = [sum(seconds(g, [most] * len(g), **sampling) for g in groups) for _ in range(2)]
        return several * (most - 1) / min(runs)

    def loop(generations: int) -> float:
        staggered = [-(-most * (i + 1) // B) for i in range(B)]
        return seconds(prompts(B * generations), staggered + [most] * (B * (generations - 1)))

    def one_token(length: int, count: int = 1) -> float:
        return statistics.median(seconds(prompts(count, length), [1] * count) for _ in range(5))

    def context(length: int) -> float:
        whole = seconds(prompts(B, length), [1 + after] * B)
        return B * after / max(whole - one_token(length, B), 1e-9)

    lengths, contexts = ((20, 40), (40,)) if args.quick else (FIRST, CONTEXTS)
    lengths, contexts = (
        [n for n in given if n + after < args.max_model_len and n * num <= MOST_TOKENS]
        for given, num in ((lengths, 1), (contexts, B))
    )
    found = {"decode": decode(), "sampled": decode(temperature=0.8, top_p=0.95)}
    begun = min(loop(1), loop(1))
    found["closed_loop"] = B * GENERATIONS * most / max(loop(1 + GENERATIONS) - begun, 1e-9)
    found["context"] = {f"{length}x{B}": context(length) for length in contexts}
    first = {str(length): 1e3 * one_token(length) for length in lengths}
    return {"tokens_per_second": found, "first_token_ms": first}


def main() -> None:
    args = parse_args()
    beside = Path(args.target).parent / "prompts.json"
    texts = json.loads(beside.read_text()) if beside.is_file() else demo_prompts()
    generate = build(args)
    found = json.dumps(settings(args) | measure(generate, texts["prompts"], args), default=str)
    if args.json is not None:
        args.json.write_text(found + "\n")
    print(found)


if __name__ == "__main__":
    main()
