"""Drafts along a guided text, verified with its grammar's masks and without.

For each token of a text that at least K more follow, two requests are made of the prompt and the
text before it, and their first token is forced to be the text's. So in both the draft proposes from
the state that the text leads to, and proposes the same. One round verifies the drafts: guided,
where the grammar masks every row, and unguided, where the target chooses freely.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec import LLM, SamplingParams
from specdec.requests.request import Request
from specdec.requests.structured_outputs import Guide
from tests.e2e.guided_cases import SCHEMAS

PROMPT = "Question: give one value as JSON.\nAnswer: "


@dataclass(frozen=True, slots=True)
class Position:
    """A round from one state of the text: its drafts, and how many of them are accepted."""

    drafts: tuple[int, ...]
    guided: int
    unguided: int
    is_targets: bool  # unguided, the target would go on as the text does


@dataclass(slots=True)
class ForcedStart:
    """A Guide: a token that has to come first, then what `after` allows, or everything."""

    first: int
    after: Guide | None
    num_bytes: int  # of a mask
    has_begun: bool = False

    @property
    def lock(self) -> object:
        return self if self.after is None else self.after.lock

    @property
    def walk_seconds(self) -> float:
        return 0.0 if self.after is None else self.after.walk_seconds

    def copy(self) -> "ForcedStart":
        after = None if self.after is None else self.after.copy()
        return ForcedStart(self.first, after, self.num_bytes, self.has_begun)

    def advance(self, tokens: Sequence[int]) -> None:
        self.has_begun |= len(tokens) > 0
        if self.after is not None:
            self.after.advance(tokens)

    def masks(self, drafts: Sequence[int], first: int = 0) -> list[bytes]:
        if not self.has_begun:
            return [(1 << self.first).to_bytes(self.num_bytes, "little")][first:]
        if self.after is None:
            return [b"\xff" * self.num_bytes] * (len(drafts) + 1 - first)
        return self.after.masks(drafts, first)

    def parts(self, first: int, end: int) -> list[tuple[int, Guide]]:
        return [(first, self)]

    @property
    def is_given_up(self) -> bool:
        return self.after is not None and self.after.is_given_up

    def give_up(self, reason: str) -> None:
        if self.after is not None:
            self.after.give_up(reason)

    @property
    def is_complete(self) -> bool:
        return self.after is not None and self.after.is_complete

    @property
    def error(self) -> str:
        return "" if self.after is None else self.after.error


def written(llm: LLM, schema: str, max_tokens: int) -> tuple[SamplingParams, list[int]]:
    """The parameters of a schema's greedy text, and its tokens."""
    case = {"json": SCHEMAS[schema]}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, structured_outputs=case)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    return params, output.outputs[0].token_ids


def forced_positions(llm: LLM, params: SamplingParams, text: Sequence[int]) -> list[Position]:
    """Verify the drafts at each t with K + 1 tokens of text from t on, in order."""
    K = llm.sizes.num_speculative_tokens
    prompt = llm.tokenizer.encode(PROMPT)
    one_round = params.clone()
    one_round.max_tokens = 2
    guide = llm.engine.intake.guide(params)
    assert guide is not None, params
    num_bytes = len(guide.masks(())[0])
    pairs = []
    for t in range(len(text) - K):
        pair = llm.engine.add_requests([([*prompt, *text[:t]], one_round)] * 2)
        for request, after in zip(pair, (guide.copy(), None), strict=True):
            request.guide = ForcedStart(text[t], after, num_bytes)
        pairs.append(pair)
        guide.advance([text[t]])
    while llm.engine.has_unfinished:
        llm.engine.step()
    return [_position(*pair, text[t : t + 2]) for t, pair in enumerate(pairs)]


def _position(guided: Request, unguided: Request, text: Sequence[int]) -> Position:
    [first], [second] = guided.stats.rounds, unguided.stats.rounds
    if first.draft_tokens != second.draft_tokens or guided.token_ids != text:
        raise AssertionError(
            f"{guided.token_ids} written, the text is {text}; drafts: {first, second}"
        )
    return Position(
        drafts=first.draft_tokens,
        guided=first.num_accepted,
        unguided=second.num_accepted,
        is_targets=unguided.token_ids == text,
    )
