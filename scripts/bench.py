"""How many tokens per second with K drafts, against plain decoding in the same process?

Generates from prompts of the bundled pair, one at a time or in batches, for each K; K = 0 is plain decoding. Refuses
to report if any output differs from plain decoding. The last line is JSON.

    python -m scripts.bench [--draft demo/eagle1] [-k 0,3,5] [--num-prompts 8] [--batch 1] [--repeats 3]

    python -m scripts.bench
    python -m scripts.bench --batch 8 | tail -1 | jq .results
"""

import argparse
import json
import platform
import statistics
import time

import torch

from specdec import LLM, RequestOutput, SamplingParams, SpeculativeConfig
from weights import demo_prompts


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="demo", help='draft for the demo target: "demo" (EAGLE-3) or "demo/eagle1"')
    parser.add_argument("-k", "--num-speculative-tokens", default="0,3,5", help="values of K, 0 is always measured")
    parser.add_argument("--num-prompts", type=int, default=8, help="of the 48 prompts of the demo pair")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--batch", type=int, default=1, help="prompts at a time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    ks = sorted({0, *(int(k) for k in args.num_speculative_tokens.split(","))})
    prompts = demo_prompts()["prompts"]
    assert isinstance(prompts, list)
    batches = [prompts[i : i + args.batch] for i in range(0, args.num_prompts, args.batch)]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    results, plain_ids = [], None
    for k in ks:
        llm = LLM(
            "demo",
            SpeculativeConfig(args.draft, k) if k else None,
            max_num_seqs=args.batch,
            dtype=args.dtype,
            device=args.device,
        )
        llm.generate(batches[0], params, use_tqdm=False)  # warm-up
        runs = [timed_run(llm, batches, params) for _ in range(args.repeats)]
        outputs = runs[0][1]
        token_ids = [output.outputs[0].token_ids for output in outputs]
        plain_ids = plain_ids or token_ids
        if token_ids != plain_ids:
            raise SystemExit(f"K = {k}: outputs differ from plain decoding; no figures for a wrong engine")
        speeds = [sum(map(len, token_ids)) / seconds for seconds, _ in runs]
        results.append(
            {
                "num_speculative_tokens": k,
                "tokens_per_second": statistics.median(speeds),
                "slowest": min(speeds),
                "fastest": max(speeds),
                "mean_acceptance_length": LLM.run_stats(outputs).mean_acceptance_length,
            }
        )
    hidden = llm.engine.runner.buffers.hidden_states
    card = {
        "machine": torch.cuda.get_device_name() if hidden.is_cuda else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "dtype": str(hidden.dtype).removeprefix("torch."),
        "draft": args.draft,
        "prompts": args.num_prompts,
        "max_tokens": args.max_tokens,
        "batch": args.batch,
        "repeats": args.repeats,
    }
    report(card, results)


def timed_run(llm: LLM, batches: list[list[list[int]]], params: SamplingParams) -> tuple[float, list[RequestOutput]]:
    """Seconds for all batches, prefill included, and their outputs."""
    start = time.perf_counter()
    outputs = [output for batch in batches for output in llm.generate(batch, params, use_tqdm=False)]
    return time.perf_counter() - start, outputs


def report(card: dict[str, object], results: list[dict[str, float]]) -> None:
    """Card, aligned table, JSON."""
    print(", ".join(f"{name} {value}" for name, value in card.items()))
    print("  K   tokens/s (slowest to fastest)   against K = 0   acceptance length")
    for row in results:
        spread = f"({row['slowest']:.1f} to {row['fastest']:.1f})"
        ratio = row["tokens_per_second"] / results[0]["tokens_per_second"]
        print(
            f"{row['num_speculative_tokens']:>3}   {row['tokens_per_second']:>8.1f} {spread:<22}"
            f"{ratio:>13.2f}x   {row['mean_acceptance_length']:>17.3f}"
        )
    print(json.dumps(card | {"results": results}))


if __name__ == "__main__":
    main()
