"""Random requests over the bundled pair: any parameter may have any of its values.

Prompts are beginnings of a few texts, so that some share a prefix. The same chance gives the same
requests.
"""

import random
from dataclasses import dataclass

from specdec import SamplingParams
from specdec.requests.intake import NewRequest
from specdec.sizes import BLOCK_SIZE
from weights.demo import demo_prompts

WORDS = ("return", "self", " = ", "):", "if")
NUM_TOKENS = 4096  # in the vocabulary of the pair
# of any request
ENDS = {
    "stop": (None, None, None, "\n\n", ("return", " = ")),
    "include_stop_str_in_output": (False, True),
    "ignore_eos": (False, True),
    "logprobs": (None, None, None, 0, 2),
    "prompt_logprobs": (None, None, None, None, 0, 3),
}
# of those that are more than plainly greedy, beside what `_rules` draws
CHOICE = {
    "temperature": (0.0, 0.6, 1.0, 1.5),
    "top_p": (1.0, 1.0, 0.8),
    "top_k": (0, 0, 20),
    "min_p": (0.0, 0.0, 0.05),
    "presence_penalty": (0.0, 0.0, 0.7),
    "frequency_penalty": (0.0, 0.0, 0.5),
    "repetition_penalty": (1.0, 1.0, 1.3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """is_special: the share of requests that are more than plainly greedy."""

    max_prompt: int
    max_tokens: int
    num_speculative_tokens: int
    is_special: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request, and the steps at which it arrives and is aborted, if it is."""

    prompt: list[int]
    values: dict[str, object]
    drafting: dict[str, object]
    priority: int
    arrival: int
    abort: int | None

    @property
    def num_speculative_tokens(self) -> int:
        return int(self.drafting.get("num_speculative_tokens", 0))

    def new_request(self, has_draft: bool = True) -> NewRequest:
        """has_draft: whether the engine has one."""
        drafting = self.drafting if has_draft else {}
        params = SamplingParams(**self.values, **drafting)
        return NewRequest(prompt=self.prompt, params=params, priority=self.priority)


def plan_requests(count: int, chance: random.Random, limits: Limits) -> list[Plan]:
    """Draw requests in the order of their arrival."""
    prompts = demo_prompts()["prompts"]
    texts = [[token for prompt in prompts[i::8] for token in prompt] for i in range(4)]
    plans = []
    arrival = 0
    for _ in range(count):
        arrival += chance.choice([0, 0, 0, 1, 4])
        max_tokens = chance.choice([chance.randint(1, limits.max_tokens), limits.max_tokens])
        plans.append(
            Plan(
                prompt=chance.choice(texts)[: _length(chance, limits.max_prompt)],
                values={"max_tokens": max_tokens} | _values(chance, max_tokens, limits),
                drafting=_drafting(chance, limits.num_speculative_tokens),
                priority=chance.choice([0, 0, 1]),
                arrival=arrival,
                abort=arrival + chance.randint(0, 20) if chance.random() < 0.15 else None,
            )
        )
    return plans


def _length(chance: random.Random, most: int) -> int:
    """Half of the prompts end where the text soon needs another block."""
    border = BLOCK_SIZE * chance.choice([1, 1, 2, 3]) - chance.randint(1, 9)
    return chance.choice([chance.randint(1, most), min(border, most)])


def _values(chance: random.Random, max_tokens: int, limits: Limits) -> dict[str, object]:
    """temperature 0 unless the request is special."""
    is_special = chance.random() < limits.is_special
    if not is_special:
        return {"temperature": 0.0} | _one_of_each(chance, {"stop": ENDS["stop"]})
    values = _one_of_each(chance, ENDS | CHOICE) | {"seed": chance.getrandbits(64)}
    if values["temperature"]:
        values["n"] = chance.choice([1, 1, 1, 2])
    return values | _rules(chance, max_tokens)


def _one_of_each(chance: random.Random, table: dict[str, tuple[object, ...]]) -> dict[str, object]:
    return {name: chance.choice(allowed) for name, allowed in table.items()}


def _rules(chance: random.Random, max_tokens: int) -> dict[str, object]:
    """What forbids or favours single tokens; each in a quarter of the requests."""
    tokens = chance.sample(range(NUM_TOKENS), 400)
    rules = {
        "bad_words": chance.sample(WORDS, 2),
        "min_tokens": chance.randint(0, max_tokens),
        "logit_bias": {token: chance.uniform(-5, 5) for token in tokens[:9]},
        "allowed_token_ids": tokens,
        "stop_token_ids": tokens[:60],
    }
    return {name: value for name, value in rules.items() if chance.random() < 0.25}


def _drafting(chance: random.Random, most: int) -> dict[str, object]:
    """A number of drafts, the engine's as often as any other together; or none."""
    if chance.random() < 0.15:
        return {"speculate": False}
    return {"num_speculative_tokens": chance.choice([most, chance.randint(0, most)])}
