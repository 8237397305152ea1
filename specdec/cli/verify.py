"""`specdec verify`: how often a draft proposes what the target says, at every position of a text.

The target writes the text. For each position t a request is made of the prompt and the text up to
t. Its prefill gives the draft true features and true tokens up to t, and its one round shows the K
drafts after them. (The rounds of a normal run start only where the last one stopped, so they count
hard positions more often.) The same prefills repeat the text: the target's token after each prefix
must be the text's, so the check also fails on a draft that changes the output.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import specdec
from specdec.cli.before_torch import check_models
from specdec.cli.choices import VerifyOptions
from specdec.cli.command import speculation_of
from specdec.cli.figures import COLUMNS, note_seed, say_what_runs
from specdec.requests.chat_format import ChatFormat
from specdec.requests.params import SamplingParams
from specdec.requests.stats import SpeculationStats
from specdec.requests.tokenizer import Tokenizer
from weights.report import OTHER_TAPS, BindingReport, wrapped

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
# fields of the target's report that name forms, where they are no plain numbers
FORMS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "expert_form")
LEAST_AGREEMENT = 0.25  # at position 1; healthy heads reach three times as much
CAUSES = (
    "the draft belongs to another target, or to another fine-tune of it",
    "taps off by one: layer ids that mean the outputs of layers, not their inputs "
    "(`specdec inspect`: aux_boundaries)",
    "d2t dropped, or absolute ids where offsets are meant",
    "a norm flag (norm_before_residual, norm_before_fc, fc_norm) missing from the checkpoint",
    "a rope base or scaling other than the one it was trained with",
    "an embedding or head of its own that is missing from the file, so that the target's is used",
)
LATE_CAUSES = (
    "the wrong hidden state is recycled: before or after the final norm (norm_output)",
    "the draft was trained without unrolled steps",
    "of P-EAGLE: not the mask token that it was trained with (`specdec inspect`: mask_token_id)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """num_agreeing[i]: positions whose first i drafts all equal the text, so [0] is all of them."""

    num_agreeing: tuple[int, ...]
    num_repeated: int  # positions at which the target repeats its own text
    acceptance: SpeculationStats  # of the run that wrote the text

    @property
    def rates(self) -> list[float | None]:
        """Say for i = 1..K how often draft i agrees if all before it did."""
        pairs = zip(self.num_agreeing, self.num_agreeing[1:], strict=False)
        return [here / before if before else None for before, here in pairs]


@dataclass(frozen=True, slots=True)
class Verdict:
    """causes: what to look at, the likeliest first."""

    works: bool
    text: str
    causes: tuple[str, ...] = ()


def run_verify(options: VerifyOptions) -> None:
    """Load, check, print in lines of 60 columns; exit code 1 if the draft does not work."""
    K = options.num_speculative_tokens
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
    assert llm.draft_report is not None, "verify without a draft"
    read = read_as(llm.target_report, llm.draft_report)
    if options.json:
        print(json.dumps(_as_json(agreement, verdict) | {"read_as": read}))
    else:
        print(_text(agreement, verdict, read))
    if not verdict.works:
        raise SystemExit(1)


def check_prompts(llm: "specdec.LLM") -> list[str | list[int]]:
    """Choose questions for a target that was trained on conversations, else code."""
    if not tells_roles_apart(llm.tokenizer):
        return list(CODE_STARTS)
    asked = ([{"role": "user", "content": question}] for question in QUESTIONS)
    return [llm.tokenizer.encode_chat(conversation) for conversation in asked]


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


def measure_agreement(
    llm: "specdec.LLM", prompts: Sequence[str | list[int]], max_tokens: int
) -> Agreement:
    """Let the target continue the prompts, then force its text through the draft."""
    K = llm.sizes.num_speculative_tokens
    texts = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    prefixes: list[list[int]] = []  # every one that K + 1 tokens of text follow
    continuations: list[list[int]] = []  # those tokens
    for text in texts:
        token_ids = text.outputs[0].token_ids
        for t in range(len(token_ids) - K):
            prefixes.append([*text.prompt_token_ids, *token_ids[:t]])
            continuations.append(token_ids[t : t + K + 1])
    if not prefixes:
        ends = f"the target ends its texts before {K + 1} tokens"
        raise ValueError(f"{ends}: nothing to check; lower the number of drafts")
    one_round = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(prefixes, one_round)
    pairs = list(zip(outputs, continuations, strict=True))
    counts = [count_equal(out.stats.rounds[0].draft_tokens, true[1:]) for out, true in pairs]
    return Agreement(
        num_agreeing=tuple(sum(count >= i for count in counts) for i in range(K + 1)),
        num_repeated=sum(out.outputs[0].token_ids[0] == true[0] for out, true in pairs),
        acceptance=specdec.LLM.run_stats(texts),
    )


def count_equal(draft_tokens: Sequence[int], true_tokens: Sequence[int]) -> int:
    """Count the drafts that equal the text, up to the first that does not."""
    pairs = zip(draft_tokens, true_tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def judge(agreement: Agreement) -> Verdict:
    """A draft works if it agrees at position 1; a later drop gets a warning."""
    positions = agreement.num_agreeing[0]
    first, second = (*agreement.rates, None)[:2]
    first = first or 0.0
    if agreement.num_repeated < positions:
        wrong = f"{positions - agreement.num_repeated} of {positions} positions"
        bug = "a bug in specdec, not in the draft; please report it"
        return Verdict(False, f"the target does not repeat its own text at {wrong}: {bug}")
    if first < LEAST_AGREEMENT:
        reached = f"{first:.0%} agreement at position 1, less than {LEAST_AGREEMENT:.0%}"
        return Verdict(False, f"the draft does not work: {reached}. Likely causes:", CAUSES)
    if second is not None and second < first / 2:
        drop = f"at position 1 ({first:.0%}) but falls to {second:.0%} at position 2"
        return Verdict(True, f"the draft works {drop}. Likely causes:", LATE_CAUSES)
    return Verdict(True, f"the draft works: {first:.0%} agreement at position 1")


def read_as(target: BindingReport, draft: BindingReport) -> dict[str, str]:
    """Say how a target's experts and forms were read, if any, and a draft's taps: both ways."""
    rows = {row.field: row.value for row in target.fields}
    forms = [f"{product} {rows[product]}" for product in FORMS if product in rows]
    found = {"forms": ", ".join(forms)} if forms else {}
    if "num_experts" in rows:
        chosen = "{experts_per_token} of {num_experts} experts a row, each {expert_width} wide"
        where = "in {layers_with_experts} of {num_layers} layers"
        weights = "add up to 1" if rows["renormalise"] else "are a softmax over all experts"
        found["router"] = f"{chosen}, {where}; their weights {weights}".format(**rows)
    [taps] = (row for row in draft.fields if row.field == "aux_boundaries")
    value = [str(taps.value)] if taps.value else []
    notes = [note for note in draft.notes if note.startswith(OTHER_TAPS)]
    return found | {"taps": "; ".join([", ".join([*value, taps.source]), *notes])}


def _text(agreement: Agreement, verdict: Verdict, read: Mapping[str, str]) -> str:
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
        *(f"{what}: {how}" for what, how in read.items()),
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
