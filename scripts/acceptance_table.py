"""How many tokens does a round give at temperature 0.7 and 1.0, by the rule of acceptance?

    python -m scripts.acceptance_table
    python -m scripts.acceptance_table --num-prompts 24 -k 3 --temperatures 0 --rules exact

The bundled pair over its own prompts, on the CPU in float32. "argmax draft": drafts are the draft's
best tokens, accepted by the target's probability alone (p/q with a one-hot q), vLLM's default; here
greedy drafts under the exact rule, whose acceptance follows the same law. Prints a table and one
line of JSON.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from specdec import LLM, SamplingParams
from specdec.bench.report import write_json
from weights.demo import demo_prompts

RULES = ("exact", "rejection", "block", "argmax draft")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-prompts", type=int, default=48, help="the first N of 48")
    parser.add_argument("--num-speculative-tokens", "-k", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperatures", default="0.7,1.0")
    parser.add_argument("--draft", default="demo", help="demo or demo/eagle1")
    parser.add_argument(
        "--rules", default=",".join(RULES), help="with commas; greedy: one is enough"
    )
    parser.add_argument("--json", type=Path, help="write the last line's JSON to a file too")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    given = parse_args(args)
    temperatures = [float(value) for value in given.temperatures.split(",")]
    prompts = demo_prompts()["prompts"][: given.num_prompts]
    lengths = {
        rule: [mean_length(rule, t, prompts, given) for t in temperatures]
        for rule in given.rules.split(",")
    }
    headings = "".join(f"{f'temperature {t:g}':>18}" for t in temperatures)
    print(f"{'mean acceptance length':<24}{headings}")
    for rule, row in lengths.items():
        print(f"{rule:<24}" + "".join(f"{length:>18.3f}" for length in row))
    found = {**vars(given), "num_prompts": len(prompts), "mean_acceptance_length": lengths}
    write_json("scripts.acceptance_table", found, given.json)


def mean_length(
    rule: str, temperature: float, prompts: Sequence[list[int]], given: argparse.Namespace
) -> float:
    """Over all rounds of all prompts; request i has seed i."""
    is_argmax = rule == "argmax draft"
    speculation = {
        "model": given.draft,
        "num_speculative_tokens": given.num_speculative_tokens,
        "adaptive": False,
    }
    speculation["acceptance"] = "exact" if is_argmax else rule
    llm = LLM("demo", speculation, device="cpu", max_num_seqs=24, max_model_len=512)
    if is_argmax:
        draft_greedily(llm)
    values = {"temperature": temperature, "max_tokens": given.max_tokens, "ignore_eos": True}
    params = [SamplingParams(seed=i, **values) for i in range(len(prompts))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return llm.run_stats(outputs).mean_acceptance_length or 0.0


def draft_greedily(llm: LLM) -> None:
    """Let the draft propose its best tokens, without noise."""
    draft = llm.engine.runner.draft
    assert draft is not None
    propose = draft._propose
    draft._propose = lambda normed_BD, i, is_sampled: propose(normed_BD, i, False)  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
