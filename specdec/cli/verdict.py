"""Does the draft work? What healthy heads reach, and what is usually wrong below the threshold."""

from dataclasses import dataclass

from specdec.cli.agreement import Agreement

LEAST_AGREEMENT = 0.25  # at position 1; healthy heads reach three times as much

# how often draft i is accepted if all before it are
HEALTHY = {
    "demo EAGLE-3": (0.69, 0.71, 0.73, 0.73, 0.77),
    "demo EAGLE-1": (0.82, 0.80, 0.83),
    "public EAGLE-3": (0.83, 0.75, 0.79, 0.65, 0.66),
}
SOURCES = (
    "demo: accepted in rounds over 24 prompts, from",
    "        weights/demo/README.md",
    "public: from the acceptance lengths on HumanEval on the card",
    "        of RedHatAI/",
    "        Llama4-Maverick-17B-128E-Instruct-speculator.eagle3",
)

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
class Verdict:
    """causes: what to look at, the likeliest first."""

    works: bool
    text: str
    causes: tuple[str, ...] = ()


def judge(agreement: Agreement) -> Verdict:
    """A draft works if it agrees at position 1; a later drop gets a warning."""
    positions = agreement.num_agreeing[0]
    first = agreement.rates[0] or 0.0
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
    second = agreement.rates[1] if len(agreement.rates) > 1 else None
    if second is not None and second < first / 2:
        drop = (
            f"the draft works at position 1 ({first:.0%}) but falls to {second:.0%} at position 2"
        )
        return Verdict(works=True, text=f"{drop}. Likely causes:", causes=LATE_CAUSES)
    return Verdict(works=True, text=f"the draft works: {first:.0%} agreement at position 1")
