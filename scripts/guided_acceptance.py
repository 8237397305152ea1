"""How many drafts are accepted along one guided text, if its grammar guides verification or not?

    python -m scripts.guided_acceptance
    python -m scripts.guided_acceptance --schemas "flat object" tree -k 3 --json FILE

The text is what the target writes greedily under a JSON schema of tests/e2e/guided_cases.py. Both
figures are teacher-forced: for each token of the text that at least K more follow, two requests are
made of the prompt and the text before it, and their first token is forced to be the text's. So in
both the draft proposes from the state that the text leads to, and proposes the same. One round
verifies the drafts: guided, where the grammar masks every row, and unguided, where the target
chooses freely. Every position counts once, unlike in a run, whose rounds begin where the last one
stopped.

Prints a table over all texts and one line of JSON. Ends with an error if the two drafts differ or a
guided round leaves the text.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from specdec import LLM, SamplingParams
from specdec.bench.report import table, write_json
from specdec.requests.guide import Guide, Part
from specdec.requests.request import Request
from tests.e2e.guided_cases import SCHEMAS

PROMPT = "Question: give one value as JSON.\nAnswer: "
KINDS = ("guided", "unguided")


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

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        if not self.has_begun:
            return [(1 << self.first).to_bytes(self.num_bytes, "little")]
        if self.after is None:
            return [b"\xff" * self.num_bytes] * (len(drafts) + 1)
        return self.after.masks(drafts)

    def parts(self, first: int, end: int) -> list[Part]:
        return [Part(first, self)]

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


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemas", nargs="+", default=list(SCHEMAS), help="default: all")
    parser.add_argument("--draft", default="demo", help="demo or demo/eagle1")
    parser.add_argument("--num-speculative-tokens", "-k", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the last line's JSON to a file too")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    given = parse_args(args)
    K = given.num_speculative_tokens
    names = given.schemas
    speculation = {"model": given.draft, "num_speculative_tokens": K, "adaptive": False}
    llm = LLM("demo", speculation, device="cpu", max_num_seqs=24, max_model_len=512)
    texts = {name: forced_positions(llm, *written(llm, name, given.max_tokens)) for name in names}
    positions = list(chain.from_iterable(texts.values()))
    if not positions:
        raise SystemExit(f"no text has {K + 1} tokens: lower -k, or raise --max-tokens")
    rows = [figures(kind, positions, K) for kind in KINDS]
    share = sum(each.is_targets for each in positions) / len(positions)
    print(table(rows))
    print(f"the target alone would go on as the text does at {share:.1%} of the positions")
    by_text = {
        name: [figures(kind, each, K) for kind in KINDS] for name, each in texts.items() if each
    }
    found = {**vars(given), "share_of_targets_own": share, "results": rows, "by_text": by_text}
    write_json("scripts.guided_acceptance", found, given.json)


def figures(kind: str, positions: Sequence[Position], K: int) -> dict[str, object]:
    """Of one way to verify. at least i: the share of positions that accept that many drafts."""
    counts = [getattr(position, kind) for position in positions]
    shares = [sum(count >= i for count in counts) / len(counts) for i in range(1, K + 1)]
    return {
        "verification": kind,
        "positions": len(counts),
        "mean_acceptance_length": 1 + sum(shares),
        **{f"at least {i}": share for i, share in enumerate(shares, start=1)},
    }


def written(llm: LLM, schema: str, max_tokens: int) -> tuple[SamplingParams, list[int]]:
    """The parameters of a schema's greedy text, and its tokens."""
    case = {"json": SCHEMAS[schema]}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, structured_outputs=case)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    return params, output.outputs[0].token_ids


def forced_positions(llm: LLM, params: SamplingParams, text: Sequence[int]) -> list[Position]:
    """One for each t with K + 1 tokens of text from t on, in order."""
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
        raise SystemExit(f"{guided.token_ids} written, the text is {text}; drafts: {first, second}")
    return Position(
        drafts=first.draft_tokens,
        guided=first.num_accepted,
        unguided=second.num_accepted,
        is_targets=unguided.token_ids == text,
    )


if __name__ == "__main__":
    main()
