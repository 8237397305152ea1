"""How often a draft proposes what the target says, at every position of a text the target wrote.

For each position t of the text a request is made of the prompt and the text up to t. Its prefill
gives the draft true features and true tokens up to t, and its one round shows the K drafts after
them. The rounds of a normal run start only where the last one stopped, so they count hard positions
more often; here every position counts once.

The same prefills repeat the text: the target's token after each prefix must be the token of the
text, which plain decoding, verification and drafts together produced. So the check also fails on a
draft that changes the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import specdec
from specdec.requests.params import SamplingParams
from specdec.requests.stats import SpeculationStats

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """causes: what to look at, the likeliest first."""

    works: bool
    text: str
    causes: tuple[str, ...] = ()


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
        raise ValueError(
            f"the target ends its texts before {K + 1} tokens: nothing to check; "
            "lower the number of drafts"
        )
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
    for i, (draft_token, true_token) in enumerate(zip(draft_tokens, true_tokens, strict=False)):
        if draft_token != true_token:
            return i
    return min(len(draft_tokens), len(true_tokens))


def judge(agreement: Agreement) -> Verdict:
    """A draft works if it agrees at position 1; a later drop gets a warning."""
    positions = agreement.num_agreeing[0]
    first, second = (*agreement.rates, None)[:2]
    first = first or 0.0
    if agreement.num_repeated < positions:
        wrong = f"{positions - agreement.num_repeated} of {positions} positions"
        text = f"the target does not repeat its own text at {wrong}: "
        return Verdict(
            works=False, text=f"{text}a bug in specdec, not in the draft; please report it"
        )
    if first < LEAST_AGREEMENT:
        reached = f"{first:.0%} agreement at position 1, less than {LEAST_AGREEMENT:.0%}"
        text = f"the draft does not work: {reached}. Likely causes:"
        return Verdict(works=False, text=text, causes=CAUSES)
    if second is not None and second < first / 2:
        drop = f"at position 1 ({first:.0%}) but falls to {second:.0%} at position 2"
        text = f"the draft works {drop}. Likely causes:"
        return Verdict(works=True, text=text, causes=LATE_CAUSES)
    return Verdict(works=True, text=f"the draft works: {first:.0%} agreement at position 1")
