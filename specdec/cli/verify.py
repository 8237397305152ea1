"""`specdec verify`: force the target's text through the draft, print agreement per position."""

import json

import specdec
from specdec.cli.agreement import Agreement, Verdict, judge, measure_agreement
from specdec.cli.before_torch import check_models
from specdec.cli.choices import VerifyOptions
from specdec.cli.command import speculation_of
from specdec.cli.figures import COLUMNS, note_seed, say_what_runs
from specdec.requests.chat_format import ChatFormat
from specdec.requests.tokenizer import Tokenizer
from weights.report import wrapped

NUM_KV_BLOCKS = 256  # enough for many short requests
# how often draft i is accepted if all before it are
HEALTHY = {
    "demo EAGLE-3": (0.69, 0.71, 0.73, 0.73, 0.77),
    "demo EAGLE-1": (0.82, 0.80, 0.83),
    "public EAGLE-3": (0.83, 0.75, 0.79, 0.65, 0.66),
}
SOURCES = (
    "demo: accepted in rounds over 24 prompts, from weights/demo/README.md",
    "public: from the acceptance lengths on HumanEval on the card",
    "    of RedHatAI/",
    "    Llama4-Maverick-17B-128E-Instruct-speculator.eagle3",
)
CODE_STARTS = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "import argparse\nimport json\nimport os\n\n\ndef main():\n"
    "    parser = argparse.ArgumentParser()\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def read_config(path):\n    with open(path) as f:\n",
    "for name, value in sorted(counts.items()):\n    if value > limit:\n",
)
QUESTIONS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in a few sentences why the sky is blue.",
    "A train travels 120 km in 1.5 hours. What is its average speed? Explain step by step.",
    "List five things to check before a long bicycle tour.",
)


def run_verify(options: VerifyOptions) -> None:
    """Load, check, print; exit code 1 if the draft does not work."""
    K = options.num_speculative_tokens
    if K < 1:
        reason = "a draft that proposes nothing cannot be checked; give at least 1"
        raise ValueError(f"--num-speculative-tokens {K}: {reason}")
    chosen = {"num_speculative_tokens": K, "adaptive": False, **options.draft_options}
    speculation = speculation_of({"model": options.draft, **chosen})
    engine = options.engine
    if "gpu_memory_utilization" not in engine:  # which sets the size of the cache too
        engine = {**engine, "num_kv_blocks": NUM_KV_BLOCKS}
    check_models(options.target, options.draft, engine)
    llm = specdec.LLM(options.target, speculative_config=speculation, **engine)
    say_what_runs(llm)
    note_seed(engine.get("seed"), temperature=0)
    agreement = measure_agreement(llm, check_prompts(llm), options.max_tokens)
    verdict = judge(agreement)
    print(json.dumps(_as_json(agreement, verdict)) if options.json else _text(agreement, verdict))
    if not verdict.works:
        raise SystemExit(1)


def check_prompts(llm: "specdec.LLM") -> list[str | list[int]]:
    """Choose questions for a target that was trained on conversations, else code."""
    if not tells_roles_apart(llm.tokenizer):
        return list(CODE_STARTS)
    return [
        llm.tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS
    ]


def tells_roles_apart(tokenizer: Tokenizer) -> bool:
    """Say whether a chat template writes a question and an answer of the same text differently."""
    if not tokenizer.has_chat_template:
        return False
    form = ChatFormat(add_generation_prompt=False)
    question = {"role": "user", "content": QUESTIONS[0]}
    alone = tokenizer.write_chat([question], form)
    answered = [question, {"role": "assistant", "content": QUESTIONS[0]}]
    both = tokenizer.write_chat(answered, form)
    added = both.removeprefix(alone)
    return both == added or not alone.endswith(added)


def _text(agreement: Agreement, verdict: Verdict) -> str:
    """Write agreement per position as aligned lines of 60 columns, and the verdict."""
    mean = agreement.acceptance.mean_acceptance_length
    length = "none" if mean is None else f"{mean:.2f}"
    repeated = f"{agreement.num_repeated} of {agreement.num_agreeing[0]} positions"
    sources, drafts = zip(*(name.split() for name in HEALTHY), strict=True)
    lines = [
        "How often draft i equals the target's text, where drafts",
        "1 to i - 1 do:",
        "",
        f"position  this draft    of{''.join(f'{source:>10}' for source in sources)}",
        f"{'':26}{''.join(f'{draft:>10}' for draft in drafts)}",
    ]
    for i, rate in enumerate(agreement.rates):
        healthy = "".join(
            f"{_percent(rates[i] if i < len(rates) else None):>10}" for rates in HEALTHY.values()
        )
        lines.append(f"{i + 1:>8}{_percent(rate):>12}{agreement.num_agreeing[i]:>6}{healthy}")
    said = [
        "",
        *SOURCES,
        "",
        f"acceptance length while the text was written: {length}",
        f"the target repeats its own text at {repeated}",
        f"{'' if verdict.works else 'WARNING: '}{verdict.text}",
        *(f"  - {cause}" for cause in verdict.causes),
    ]
    return "\n".join([*lines, *wrapped(said, COLUMNS)])


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"


def _as_json(agreement: Agreement, verdict: Verdict) -> dict[str, object]:
    return {
        "works": verdict.works,
        "verdict": verdict.text,
        "likely_causes": list(verdict.causes),
        "agreement": agreement.rates,
        "num_agreeing": list(agreement.num_agreeing),
        "num_repeated": agreement.num_repeated,
        "healthy": {name: list(rates) for name, rates in HEALTHY.items()},
        "acceptance": agreement.acceptance.as_dict(),
    }
