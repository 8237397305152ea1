"""Requests of an open loop: when each is sent, its prompt, and how long its answer may be.

Arrivals are a Poisson process. Lengths are lognormal with the means of ShareGPT's conversations as
serving benchmarks use them: prompts of 215 tokens, answers of 198. Times and lengths follow from a
seed; the words are new in each run, so that no cache of prompts knows them.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

PROMPT_MEAN, PROMPT_SPREAD = 215, 1.3  # spread: of the logarithm
ANSWER_MEAN, ANSWER_SPREAD = 198, 1.0
SHORTEST, LONGEST = 4, 1024  # tokens of a prompt or an answer
# each is a token of its own for most tokenizers
WORDS = (
    *("time", "people", "water", "light", "house", "number", "paper", "river", "music", "green"),
    *("small", "large", "early", "second", "place", "world", "story", "point", "country", "road"),
    *("winter", "summer", "market", "letter", "teacher", "doctor", "morning", "evening", "city"),
    *("question", "answer", "reason", "table", "field", "voice", "power", "line", "ship", "train"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """tokens_per_word: of the server's tokenizer. most_tokens: of a prompt and its answer."""

    tokens_per_word: float
    most_tokens: int | None
    most_answer: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """at: seconds from the start."""

    at: float
    prompt: str
    max_tokens: int


def arrivals(rate: float, count: int, lengths: Lengths, seed: int) -> Iterator[Arrival]:
    """`count` requests at `rate` requests a second."""
    chance = random.Random(seed)
    at = 0.0
    for _ in range(count):
        at += chance.expovariate(rate)
        num_tokens = _length(chance, PROMPT_MEAN, PROMPT_SPREAD)
        most = _length(chance, ANSWER_MEAN, ANSWER_SPREAD)
        if lengths.most_answer is not None:
            most = min(most, lengths.most_answer)
        if lengths.most_tokens is not None:
            most = min(most, lengths.most_tokens // 2)
            num_tokens = min(num_tokens, lengths.most_tokens // 2 - SHORTEST)
        num_words = max(round(num_tokens / lengths.tokens_per_word), 1)
        yield Arrival(at=at, prompt=words(num_words), max_tokens=most)


def words(count: int) -> str:
    """A text of random words."""
    return " ".join(random.SystemRandom().choices(WORDS, k=count))


def _length(chance: random.Random, mean: float, spread: float) -> int:
    drawn = chance.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return round(min(max(drawn, SHORTEST), LONGEST))
