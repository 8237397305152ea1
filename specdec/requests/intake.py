"""Makes requests of a caller's prompts and parameters: tokens, limits, seeds, checks of sizes.

A caller may give one thing or several: as_prompts and its like make lists. ValueError names what is
wrong.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index as as_index
from typing import Any, NotRequired, Protocol, TypedDict, cast

from specdec.arguments import as_list, is_integer, plain, refuse_unknown
from specdec.requests.chat_format import Conversation
from specdec.requests.params import NUM_SEEDS, SamplingParams, SamplingStart
from specdec.requests.request import FinishRules, Request
from specdec.requests.stats import RequestStats
from specdec.requests.structured_outputs import Guide, GuideSource, StructuredOutputsParams
from specdec.requests.tokenizer import Detokenizer, Tokenizer
from specdec.sizes import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, MAX_STOP_IDS, EngineSizes


class ArrayLike(Protocol):
    """An array of numpy or a tensor of torch."""

    def tolist(self) -> Any:
        pass


class TextPrompt(TypedDict):
    """A prompt as text; vLLM's form."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids; vLLM's form. prompt: their text, which the output repeats."""

    prompt_token_ids: Sequence[int] | ArrayLike
    prompt: NotRequired[str]


Prompt = str | Sequence[int] | ArrayLike | TextPrompt | TokensPrompt
PROMPT_KEYS = ("prompt", "prompt_token_ids")
AS_GIVEN = (  # parameters in a state row
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "allowed_token_ids"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A prompt and its parameters, copied: the caller may change its own at any time.

    priority: lower goes first. request_id: None for a number. arrival_time: seconds of the host's
    monotonic clock
    """

    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    request_id: str | None = None
    arrival_time: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", _copy(self.prompt))
        if isinstance(self.params, SamplingParams):  # else it is refused later
            object.__setattr__(self, "params", self.params.clone())


class Intake:
    """eos_token_ids: the ids that end a text, as the checkpoint says. seed: to draw seeds from.

    guides: compiles grammars.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sizes: EngineSizes,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        seed: int | None = None,
        acceptance: str = "exact",
        guides: GuideSource | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.sizes = sizes
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.acceptance = acceptance
        self.guides = guides
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self._num_requests = self._num_samples = 0

    def samples(self, new: NewRequest) -> list[Request]:
        """Make the n samples of a request, without seeds. ValueError says what is wrong with it."""
        if not isinstance(new.params, SamplingParams):
            raise ValueError(f"sampling_params={new.params!r}: give SamplingParams")
        params = new.params
        text, token_ids = self._read(new.prompt)
        self._check_prompt(token_ids, params)
        guide = self.guide(params)
        sampling = SamplingStart(
            **{name: getattr(params, name) for name in AS_GIVEN},
            top_k=min(params.top_k, self.vocab_size),
            logit_bias=params.logit_bias or {},
            bad_words=self._bad_words(params),
            prompt=token_ids,
        )
        samples = [self._sample(new, text, token_ids, sampling, index) for index in range(params.n)]
        self._num_requests += 1
        for sample in samples:
            if params.n > 1:  # a list of itself would keep it until the next garbage collection
                sample.samples = samples
            sample.guide = None if guide is None else guide.copy()
        return samples

    def draw_seed(self, samples: Sequence[Request]) -> None:
        """Draw the seed of a request that is accepted: a refused one changes no other's seed."""
        first = samples[0].params.seed
        if first is None:
            first = self._seeds.getrandbits(64)
        for sample in samples:
            seed = (first + sample.index) % NUM_SEEDS
            sample.sampling = replace(sample.sampling, seed=seed)

    def guide(self, params: SamplingParams) -> Guide | None:
        """Compile the grammar, if there is one, and keep it. Any thread may call it."""
        if params.structured_outputs is None:
            return None
        assert self.guides is not None, "no compiler of grammars"
        return self.guides.compile(StructuredOutputsParams.of(params.structured_outputs))

    def check_guide(self, params: SamplingParams) -> None:
        """Check it before a server queues the request; GrammarsBusyError: it may come later."""
        if params.structured_outputs is not None:
            assert self.guides is not None, "no compiler of grammars"
            self.guides.check(StructuredOutputsParams.of(params.structured_outputs))

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, Mapping):
            return None, _as_ids(prompt)
        refuse_unknown("a prompt", prompt, PROMPT_KEYS)
        text, ids = (prompt.get(name) for name in PROMPT_KEYS)
        if not isinstance(text, str | None) or (text is None and ids is None):
            wanted = '{"prompt": text} or {"prompt_token_ids": a list of token ids}'
            raise ValueError(f"prompt={prompt!r}: give {wanted}")
        return text, self.tokenizer.encode(text or "") if ids is None else _as_ids(ids)

    def _sample(
        self,
        new: NewRequest,
        text: str | None,
        token_ids: list[int],
        sampling: SamplingStart,
        index: int,
    ) -> Request:
        params, P = new.params, len(token_ids)
        count, most = params.num_speculative_tokens, self.sizes.num_speculative_tokens
        if count is None:
            count = most if params.speculate else 0
        if count > most:
            what = f"num_speculative_tokens={count} of a request"
            raise ValueError(f"{what}: the engine was built for at most {most}")
        self._num_samples += 1
        return Request(
            request_id=str(self._num_requests) if new.request_id is None else new.request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            rules=self._rules(P, params),
            detokenizer=Detokenizer(self.tokenizer, params.skip_special_tokens),
            stats=RequestStats(self.acceptance, P, arrival_time=new.arrival_time),
            sampling=sampling,
            index=index,
            priority=new.priority,
            number=self._num_samples,
            num_speculative_tokens=count,
        )

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """List the ids of each bad word at the start of a text and, if as many, after a space."""
        found: list[list[int]] = []
        for word in params.bad_words or ():
            try:
                plain = self.tokenizer.encode_word(word.lstrip())
                spaced = self.tokenizer.encode_word(" " + word.lstrip())
            except ValueError as error:
                raise ValueError(f"bad_words: {error}") from error
            found.append(plain)
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                found.append(spaced)
        if len(found) > MAX_BAD_WORDS or any(len(ids) > MAX_BAD_WORD_LENGTH for ids in found):
            raise ValueError(
                f"bad_words={list(params.bad_words or ())!r}: {len(found)} sequences of at most "
                f"{max(map(len, found))} tokens, with those of words after a space; at most "
                f"{MAX_BAD_WORDS} of at most {MAX_BAD_WORD_LENGTH} are possible"
            )
        return found

    def _rules(self, num_prompt_tokens: int, params: SamplingParams) -> FinishRules:
        room = self.sizes.max_model_len - num_prompt_tokens
        return FinishRules(
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            min_tokens=min(params.min_tokens, room),
            eos_token_ids=frozenset() if params.ignore_eos else self.eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            stop_strings=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )

    def _check_prompt(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        limit = self.sizes.max_model_len
        if not token_ids:
            raise ValueError("empty prompt: give at least one token")
        stop_token_ids = params.stop_token_ids or ()
        eos_token_ids = () if params.ignore_eos else self.eos_token_ids
        if params.min_tokens and len({*eos_token_ids, *stop_token_ids}) > MAX_STOP_IDS:
            what = f"min_tokens with more than {MAX_STOP_IDS} EOS and stop_token_ids"
            raise ValueError(f"{what}: give fewer of them")
        for name, tokens in (
            ("", token_ids),
            ("stop_token_ids: ", stop_token_ids),
            ("logit_bias: ", params.logit_bias or ()),
            ("allowed_token_ids: ", params.allowed_token_ids or ()),
        ):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
                token = next(each for each in tokens if not 0 <= each < self.vocab_size)
                vocabulary = f"the target's vocabulary (0 to {self.vocab_size - 1})"
                raise ValueError(f"{name}token id {token} is outside {vocabulary}")
        if len(token_ids) >= limit:
            what = f"prompt of {len(token_ids)} tokens leaves no room for an answer in"
            advice = f"shorten it to at most {limit - 1} tokens, or raise max_model_len"
            raise ValueError(f"{what} max_model_len={limit}: {advice}")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Wrap a single prompt; integers are its token ids. Intake checks what each prompt holds."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    wanted = "text, a list of token ids, or a list of these"
    given = from_array(prompts)
    items = as_list("prompts", given if isinstance(given, list) else prompts, wanted)
    if items and all(map(is_integer, items)):
        return [cast(list[int], items)]
    batch: list[Prompt] = []
    for index, item in enumerate(map(from_array, items)):
        if isinstance(item, int) or not isinstance(item, str | Sequence | Mapping):
            raise ValueError(f"prompts[{index}] is {item!r}: give text or a list of token ids")
        batch.append(cast(Prompt, item))
    return batch


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Wrap a single conversation (a list of lists is several); each is checked when encoded."""
    if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple):
        return list(cast(Sequence[Conversation], messages))
    return [cast(Conversation, messages)]


def as_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Give each prompt its parameters, which are checked with its request."""
    if sampling_params is None:
        return [SamplingParams()] * count
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    params = as_list("sampling_params", sampling_params, "SamplingParams, or a list of them")
    if len(params) != count:
        raise ValueError(
            f"{len(params)} sampling_params for {count} prompts: give one, or one for each"
        )
    return cast(list[SamplingParams], params)


def as_priorities(priority: Sequence[int] | None, count: int) -> list[int]:
    """Give each prompt its priority; 0 if none is given."""
    if priority is None:
        return [0] * count
    wanted = f"a list of {count} integers, one for each prompt, or None"
    priorities = as_list("priority", priority, wanted)
    if len(priorities) != count or not all(map(is_integer, priorities)):
        raise ValueError(f"priority={priority!r}: give {wanted}")
    return cast(list[int], plain(priorities))


def refuse_lora(lora_request: object) -> None:
    if lora_request is not None:
        advice = "LoRA is not supported; merge the adapter into the target's weights"
        raise ValueError(f"lora_request={lora_request!r}: {advice}")


def from_array(value: object) -> object:
    """Turn an array or tensor into lists of Python's numbers by its `tolist`; keep the rest."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) and not isinstance(value, memoryview) else value


def _copy(prompt: Any) -> Any:
    """Copy what the caller could still change; an array becomes lists."""
    if isinstance(prompt, Mapping):
        return {name: _copy(value) for name, value in prompt.items()}
    return list(prompt) if isinstance(prompt, list) else from_array(prompt)


def _as_ids(prompt: object) -> list[int]:
    """Take integers of any type. Reject floats, numeric strings and booleans."""
    wanted = "text or a list of token ids"
    if isinstance(prompt, Iterator):  # can be read only once
        raise ValueError(f"prompt={prompt!r}: give {wanted}")
    tokens = as_list("prompt", prompt, wanted)
    try:
        types = set(map(type, tokens))
        if bool in types:
            raise TypeError("True and False are no token ids")
        return [*(tokens if types == {int} else map(as_index, tokens))]  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"prompt={prompt!r}: give {wanted}") from error
