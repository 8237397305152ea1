"""How a request's tokens are chosen and where its text ends. Names and defaults are vLLM's.

SamplingStart and SamplingFlags say of them what the device has to know.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields, replace
from enum import Enum
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from specdec.arguments import check_bool, from_mapping, is_integer, plain, refusing_unknown
from specdec.from_vllm import SAMPLING
from specdec.requests.structured_outputs import StructuredOutputsParams
from weights.errors import CheckpointError, Problems
from weights.fields import read_json_object

logger = logging.getLogger("specdec")

MAX_LOGPROBS = 20
ALL_LOGPROBS = 1 << 30  # more than any vocabulary has tokens
MAX_SAMPLES = 1024  # of one request
SWITCHES = (
    *("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"),
    "speculate",
)
LISTS = {
    "stop": "a string or a list of strings",
    "stop_token_ids": "a list of token ids",
    "bad_words": "a list of non-empty strings",
    "allowed_token_ids": "a list of token ids, or None",
}
NUM_SEEDS = 1 << 64
Check = tuple[Callable[[Any], object], str]  # whether a value fits, and what to give
MIN_TEMPERATURE = 0.01  # below it, float32 no longer tells logits / temperature apart
# what vLLM reads of a checkpoint's generation_config.json, and what it is called here
RECOMMENDED = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


class SamplingFlags(NamedTuple):
    """The parts of sampling that the requests of a step need; others are skipped.

    A row does not depend on its neighbours: rows that do not use a part are left unchanged by it.
    """

    noise: bool = False  # a temperature above 0
    floor: bool = False  # top_p, top_k or min_p
    bias: bool = False  # logit_bias or allowed_token_ids
    bad_words: bool = False
    penalties: bool = False
    guided: bool = False  # a grammar, whose masks come with the step
    logprobs: int = -1  # alternatives beside the token, -1 = no logprobs

    def __or__(self, other: "SamplingFlags") -> "SamplingFlags":
        return SamplingFlags._make(map(max, self, other))

    @property
    def logits(self) -> bool:
        """Whether the step writes logits to memory; else the best token is chosen on the fly."""
        return self != GREEDY

    @staticmethod
    def of_all(parts: "Iterable[SamplingFlags]") -> "SamplingFlags":
        return reduce(SamplingFlags.__or__, set(parts), GREEDY)  # most are equal


GREEDY = SamplingFlags()
EVERYTHING = SamplingFlags._make([True] * 6 + [1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingStart:
    """The sampling part of a state row, in ids. The default is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    prompt: Sequence[int] = ()  # needed with penalties and bad words

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)


class RequestOutputKind(Enum):
    """Says what an output of AsyncLLM.generate has: all so far, what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@refusing_unknown(SAMPLING, max_new_tokens="max_tokens")
@dataclass(slots=True)
class SamplingParams:
    """Holds the parameters of one request. ValueError names the one that is invalid.

    How tokens are chosen, in this order: logit_bias {token id: added to its logit};
    allowed_token_ids, excluding all others; bad_words, never completed; no end of text before
    min_tokens; repetition_penalty (prompt and output), frequency_penalty and presence_penalty
    (output); temperature (0 = greedy; above 0 at least 0.01); min_p; top_k (0 or -1 = off); top_p.
    seed: any integer, taken modulo 2^64; None or -1 draws one, which the output reports. n:
    samples, at most 1,024; sample i has seed + i.
    logprobs, prompt_logprobs: how many alternatives beside each token, by the target's own logits;
    -1 = the whole vocabulary.
    How much is drafted, which changes speed only: num_speculative_tokens, at most (and by default)
    the engine's; speculate=False never drafts.
    Where the text ends: max_tokens (alias max_new_tokens), None = the end of the context; stop:
    strings that end it, cut off unless include_stop_str_in_output; stop_token_ids: further ids that
    end it; ignore_eos. detokenize=False: token ids only, the text stays empty.
    structured_outputs: what the text must follow, StructuredOutputsParams or a dict of its fields;
    the text ends once nothing may follow, min_tokens or not.
    output_kind: what the outputs of AsyncLLM have: CUMULATIVE, everything so far; DELTA, the new
    text, tokens and logprobs of each sample; FINAL_ONLY, one output at the end.

    Positional arguments are in vLLM's order. A request takes a copy, checked once more.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 256
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    _: KW_ONLY
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    speculate: bool = True
    num_speculative_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, object] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    max_new_tokens: InitVar[int | None] = None

    def __post_init__(self, max_new_tokens: int | None) -> None:
        if max_new_tokens is not None:
            self.max_tokens = max_new_tokens
        for name in (each.name for each in fields(self) if each.name != "structured_outputs"):
            setattr(self, name, plain(getattr(self, name)))
        if is_integer(self.top_k) and self.top_k == -1:
            self.top_k = 0
        if is_integer(self.seed):
            self.seed = None if self.seed == -1 else self.seed % NUM_SEEDS
        _check_values(self)
        if 0 < self.temperature < MIN_TEMPERATURE:
            words = "temperature=%g is raised to %g (0 is greedy)"
            logger.warning(words, self.temperature, MIN_TEMPERATURE)
            self.temperature = MIN_TEMPERATURE
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        _check_together(self)

    def clone(self) -> "SamplingParams":
        """Return a checked copy, independent of this one."""
        return replace(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_logprobs(self) -> int | None:
        return ALL_LOGPROBS if self.logprobs == -1 else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return ALL_LOGPROBS if self.prompt_logprobs == -1 else self.prompt_logprobs

    @property
    def flags(self) -> SamplingFlags:
        has_limit = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return SamplingFlags(
            noise=self.temperature > 0,
            floor=self.temperature > 0 and has_limit,
            bias=bool(self.logit_bias) or self.allowed_token_ids is not None,
            bad_words=bool(self.bad_words),
            penalties=penalties != (1, 0, 0),
            guided=self.structured_outputs is not None,
            logprobs=-1 if self.num_logprobs is None else self.num_logprobs,
        )


def recommended_params(directory: Path) -> SamplingParams:
    """Read a checkpoint's recommended sampling, else the defaults; CheckpointError if invalid."""
    file = directory / "generation_config.json"
    problems = Problems(directory)
    given = read_json_object(file, problems) if file.is_file() else {}
    problems.raise_if_any()
    values = {own: given[name] for name, own in RECOMMENDED.items() if given.get(name) is not None}
    try:
        return from_mapping(SamplingParams, values)
    except ValueError as error:
        raise CheckpointError(directory, (f"{file.name}: {error}",)) from error


def _check_values(params: SamplingParams) -> None:
    for name in SWITCHES:
        check_bool(name, getattr(params, name))
    for name, wanted in LISTS.items():  # an iterator is none, since it can be read only once
        value = getattr(params, name)
        is_text = isinstance(value, bytes | bytearray | memoryview)
        is_text = is_text or (isinstance(value, str) and name != "stop")
        if is_text or not isinstance(value, Sequence | Set | None):
            raise ValueError(f"{name}={value!r}: give {wanted}")
    for name, (fits, wanted) in (NEEDED | OPTIONAL).items():
        value = getattr(params, name)
        if not (value is None and name in OPTIONAL) and not fits(value):
            raise ValueError(f"{name}={value!r}: give {wanted}")


def _check_together(params: SamplingParams) -> None:
    if params.n > 1 and params.temperature == 0:
        raise ValueError(f"n={params.n} with temperature=0: greedy samples are equal; give n=1")
    K, most = params.num_speculative_tokens, params.max_tokens
    if K and not params.speculate:
        raise ValueError(f"num_speculative_tokens={K} with speculate=False: leave one of them out")
    if not _is_count(params.min_tokens) or (most is not None and params.min_tokens > most):
        end = "the end of the context" if most is None else f"max_tokens={most}"
        raise ValueError(f"min_tokens={params.min_tokens!r}: give an integer from 0 to {end}")
    if params.stop_strings and not params.detokenize:
        raise ValueError(
            f"stop={params.stop!r} with detokenize=False: there is no text to find it in; leave "
            "one of them out, or give stop_token_ids"
        )
    if params.structured_outputs is not None and params.ignore_eos:
        raise ValueError(
            "ignore_eos=True with structured_outputs: the text ends where its grammar does; leave "
            "one of them out"
        )


def _is_number(value: object) -> TypeGuard[float]:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max


def _is_count(value: object) -> TypeGuard[int]:
    return is_integer(value) and value >= 0


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_count(token) and _is_number(bias) and -100 <= bias <= 100
        for token, bias in value.items()
    )


def _within(low: float, high: float) -> Check:
    fits = lambda x: _is_number(x) and low <= x <= high  # noqa: E731
    return fits, f"a number from {low:g} to {high:g}"


NUM_LOGPROBS = (
    lambda x: is_integer(x) and -1 <= x <= MAX_LOGPROBS,
    f"an integer from 0 to {MAX_LOGPROBS}, -1 for the whole vocabulary, or None",
)
# what each value must be
NEEDED: dict[str, Check] = {
    "output_kind": (lambda x: isinstance(x, RequestOutputKind), "a RequestOutputKind"),
    "temperature": (lambda x: _is_number(x) and x >= 0, "0 (greedy) or a number above 0"),
    "top_p": (lambda x: _is_number(x) and 0 < x <= 1, "a number above 0 and at most 1"),
    "min_p": _within(0, 1),
    "presence_penalty": _within(-2, 2),
    "frequency_penalty": _within(-2, 2),
    # logits are divided by it: one that float32 rounds to 0 would make them infinite
    "repetition_penalty": _within(1e-6, 1e6),
    "top_k": (_is_count, "an integer from 1, or 0 or -1 for none"),
    "n": (lambda x: is_integer(x) and 1 <= x <= MAX_SAMPLES, f"an integer from 1 to {MAX_SAMPLES}"),
}
OPTIONAL: dict[str, Check] = {
    "seed": (is_integer, "an integer, or None to have one drawn"),
    "logprobs": NUM_LOGPROBS,
    "prompt_logprobs": NUM_LOGPROBS,
    "logit_bias": (_is_bias, "{token id: number from -100 to 100}"),
    "bad_words": (lambda x: all(isinstance(w, str) and w.strip() for w in x), LISTS["bad_words"]),
    "allowed_token_ids": (lambda x: x and all(map(_is_count, x)), "at least one token id, or None"),
    "num_speculative_tokens": (_is_count, "an integer of at least 0, or None for the engine's"),
    "max_tokens": (
        lambda x: is_integer(x) and x >= 1,
        "an integer of at least 1, or None for the end of the context",
    ),
    "stop": (lambda x: x != "" and all(isinstance(s, str) and s for s in x), "non-empty strings"),
    "stop_token_ids": (lambda x: all(map(_is_count, x)), "token ids, integers of at least 0"),
}
