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
from specdec.requests.output import RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.stats import SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """num_agreeing[i]: positions whose first i drafts all equal the text, so [0] is all of them."""

    num_agreeing: tuple[int, ...]
    num_repeated: int  # positions at which the target repeats its own text
    acceptance: SpeculationStats  # of the run that wrote the text

    @property
    def rates(self) -> list[float | None]:
        """For i = 1..K: how often draft i agrees if all before it did."""
        pairs = zip(self.num_agreeing, self.num_agreeing[1:], strict=False)
        return [here / before if before else None for before, here in pairs]


def measure_agreement(
    llm: "specdec.LLM", prompts: Sequence[str | list[int]], max_tokens: int
) -> Agreement:
    """Let the target continue the prompts, then force its text through the draft."""
    K = llm.sizes.num_speculative_tokens
    texts = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    prefixes, continuations = _cut_everywhere(texts, K)
    if not prefixes:
        raise ValueError(
            f"the target ends its texts before {K + 1} tokens: nothing to check; "
            "lower the number of drafts"
        )
    one_round = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(prefixes, one_round)
    pairs = list(zip(outputs, continuations, strict=True))
    counts = [count_equal(out.stats.rounds[0].draft_tokens, true[1:]) for out, true in pairs]
    repeated = [out.outputs[0].token_ids[0] == true[0] for out, true in pairs]
    return Agreement(
        num_agreeing=tuple(sum(count >= i for count in counts) for i in range(K + 1)),
        num_repeated=sum(repeated),
        acceptance=specdec.LLM.run_stats(texts),
    )


def _cut_everywhere(
    texts: Sequence[RequestOutput], K: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Every prefix that K + 1 tokens of text follow, and those tokens."""
    prefixes = []
    continuations = []
    for text in texts:
        token_ids = text.outputs[0].token_ids
        for t in range(len(token_ids) - K):
            prefixes.append([*text.prompt_token_ids, *token_ids[:t]])
            continuations.append(token_ids[t : t + K + 1])
    return prefixes, continuations


def count_equal(draft_tokens: Sequence[int], true_tokens: Sequence[int]) -> int:
    """Drafts that equal the text, up to the first that does not."""
    for i, (draft_token, true_token) in enumerate(zip(draft_tokens, true_tokens, strict=False)):
        if draft_token != true_token:
            return i
    return min(len(draft_tokens), len(true_tokens))
