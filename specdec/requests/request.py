"""A request on the host: its prompt, tokens and text so far, and its state row and cache blocks.

find_finish says where it ends: tokens are scanned in order and the earliest position wins; at one
position a stop string goes before a stop token or EOS, and both before the length. Everything after
that position is dropped. It is read piece by piece as it grows; RequestOutput.add joins pieces to
the whole.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from specdec.requests.output import CompletionOutput, Logprob, RequestOutput
from specdec.requests.params import SamplingFlags, SamplingParams, SamplingStart
from specdec.requests.stats import RequestStats
from specdec.requests.structured_outputs import Guide
from specdec.requests.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRules:
    """A request's limits: no eos_token_ids with ignore_eos, max_tokens within max_model_len."""

    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: Collection[int] = ()
    stop_token_ids: Collection[int] = ()
    stop_strings: Sequence[str] = ()
    include_stop_str_in_output: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """stop_reason: the string or token id of reason "stop", None for EOS and "length"."""

    reason: str
    num_tokens: int  # generated tokens that are kept
    num_text_tokens: int  # those whose text is kept: a stop token's is not
    num_chars: int | None = None  # where a stop string cuts the text
    stop_reason: str | int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sample of a caller's request. samples: all of them; empty where there is only one.

    Sample `index` has seed + index.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    rules: FinishRules
    detokenizer: Detokenizer
    stats: RequestStats
    sampling: SamplingStart = field(default_factory=SamplingStart)
    flags: SamplingFlags = field(init=False)  # of its parameters
    index: int = 0
    samples: "list[Request]" = field(default_factory=list)
    priority: int = 0  # lower goes first
    number: int = 0  # in the order of arrival
    num_speculative_tokens: int = 0  # its own K
    guide: Guide | None = None  # of a text with a grammar

    # kept by the scheduler
    state_row: int = -1  # -1 = none
    blocks: list[int] = field(default_factory=list)
    # the prompt, and after a preemption the generated tokens; prefill computes all of it but a
    # generated last token, which the next round computes; an array of int64 while it has a row
    context: Sequence[int] = ()
    num_prefilled: int = 0  # tokens of the context that are computed, or in a launched step
    num_in_flight: int = 0  # launched steps whose results are not read yet
    least_pending: int = 0  # the fewest tokens that these can bring
    most_pending: int = 0  # and the most
    num_valid: int = 0  # positions that both caches are known to hold
    keys: list[bytes] = field(default_factory=list)  # of its whole blocks so far (block_pool.py)
    num_published: int = 0  # blocks that the pool has a key for
    has_faulty_blocks: bool = False  # its end shows that their contents may be wrong

    token_ids: list[int] = field(default_factory=list)
    # ends[i]: characters of text that token_ids[: i + 1] completed; extended when text is needed
    ends: list[int] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of token_ids, if asked for
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flags = self.params.flags

    @property
    def all_samples(self) -> "list[Request]":
        return self.samples or [self]

    @property
    def num_tokens(self) -> int:
        """Count prompt and generated tokens; the last generated one is not computed yet."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def order(self) -> tuple[int, int]:
        """Rank by priority, then arrival: the lowest goes first."""
        return self.priority, self.number

    @property
    def is_ending(self) -> bool:
        """Tell whether it has ended, or the steps in flight are sure to end it."""
        least_tokens = len(self.token_ids) + self.least_pending
        return self.finish is not None or least_tokens >= self.rules.max_tokens

    @property
    def may_be_ending(self) -> bool:
        """Tell whether it has ended, or ends with the steps in flight if all drafts hold."""
        tokens = len(self.token_ids) + self.most_pending
        return self.finish is not None or tokens >= self.rules.max_tokens

    @property
    def waits_for_results(self) -> bool:
        """Tell whether its next step must wait: its masks depend on steps in flight."""
        return self.guide is not None and self.finish is None and self.num_in_flight > 0

    def tokens(self, start: int, stop: int) -> list[int]:
        P = len(self.prompt_token_ids)
        generated = self.token_ids[max(start - P, 0) : max(stop - P, 0)]
        return self.prompt_token_ids[start:stop] + generated

    def append(self, tokens: list[int], now: float) -> None:
        """Add a step's tokens; at the request's end cut them and set `finish`. now: seconds."""
        num_before = len(self.token_ids)
        self.token_ids += tokens
        if self.rules.stop_strings:
            self._complete_text()
        text = self.detokenizer.text
        self.finish = find_finish(self.rules, self.token_ids, text, self.ends, num_before)
        if self.finish is not None:
            del self.token_ids[self.finish.num_tokens :]
            del self.logprobs[self.finish.num_tokens :]
        if self.guide is not None:
            self.guide.advance(self.token_ids[num_before:])
        if self.stats.first_token_time is None:
            self.stats.first_token_time = now
        self.stats.last_token_time = now
        self.stats.num_generated_tokens = len(self.token_ids)

    def _complete_text(self) -> None:
        """Bring text and `ends` up to the last token: for stop strings, or on demand."""
        for token in self.token_ids[len(self.ends) :] if self.params.detokenize else ():
            self.detokenizer.push(token)
            self.ends.append(len(self.detokenizer.text))

    def end_without_candidates(self) -> None:
        """End because no token may be drawn, naming the parameters that exclude all of them.

        A text that its grammar has completed ends well.
        """
        if self.guide is not None and self.guide.is_complete:
            return self.end("stop")
        count = len(self.token_ids)
        limits = ("allowed_token_ids", "bad_words", "structured_outputs")
        names = [name for name in limits if getattr(self.params, name)]
        names += ["min_tokens"] if count < self.params.min_tokens else []
        if self.guide is not None and self.guide.error:
            return self.end("error", f"structured_outputs: {self.guide.error}")
        message = f"no token is left at position {count} of the output"
        return self.end("error", f"{message}: forbidden by {', '.join(names)}")

    def end(self, reason: str, message: str | None = None) -> None:
        """End here, for a reason other than the text."""
        count = len(self.token_ids)
        self.finish = Finish(reason, count, count, stop_reason=message)

    @property
    def is_finished(self) -> bool:
        return all(sample.finish is not None for sample in self.all_samples)

    def text(self) -> str:
        """Return what is certain while it runs, then all of it, or the text up to a stop string."""
        self._complete_text()
        if not self.params.detokenize:
            return ""
        if self.finish is None:
            return self.detokenizer.text[: num_certain_chars(self.rules, self.detokenizer.text)]
        if self.finish.num_chars is not None:
            return self.detokenizer.text[: self.finish.num_chars]
        return self.detokenizer.decode_all(self.finish.num_text_tokens)


def find_finish(
    rules: FinishRules, tokens: Sequence[int], text: str, ends: Sequence[int], num_before: int
) -> Finish | None:
    """Find the end among tokens[num_before:].

    tokens: all generated tokens so far, and their text. ends[i]: characters of the text that
    tokens[: i + 1] completed.
    """
    for index in range(num_before, len(tokens)):
        count, token = index + 1, tokens[index]
        if count > rules.min_tokens:
            cut = _stop_string(rules, text, ends, index) if rules.stop_strings else None
            if cut is not None:
                return Finish("stop", count, count, *cut)
            is_eos = token in rules.eos_token_ids
            if is_eos or token in rules.stop_token_ids:
                num_text_tokens = count if rules.include_stop_str_in_output else index
                return Finish("stop", count, num_text_tokens, None, None if is_eos else token)
        if count >= rules.max_tokens:
            return Finish("length", count, count)
    return None


def num_certain_chars(rules: FinishRules, text: str) -> int:
    """Count the characters of a running request's text that no stop string can still remove."""
    if rules.include_stop_str_in_output:
        return len(text)
    longest = max((len(stop) for stop in rules.stop_strings), default=1)
    for start in range(max(len(text) - longest + 1, 0), len(text)):
        tail = text[start:]
        if any(stop.startswith(tail) and stop != tail for stop in rules.stop_strings):
            return start
    return len(text)


def _stop_string(
    rules: FinishRules, text: str, ends: Sequence[int], index: int
) -> tuple[int, str] | None:
    """Find where a stop string that this token completed cuts: the earliest, then longest."""
    before = ends[index - 1] if index else 0
    found = []
    for stop in rules.stop_strings:
        start = text.find(stop, max(before - len(stop) + 1, 0), ends[index])
        if start >= 0:
            found.append((start, -len(stop), stop))
    if not found:
        return None
    start, _, stop = min(found)
    return start + (len(stop) if rules.include_stop_str_in_output else 0), stop


@dataclass(slots=True)
class Seen:
    num_chars: int = 0
    num_tokens: int = 0
    num_rounds: int = 0
    cumulative_logprob: float = 0.0
    is_over: bool = False


class Pieces:
    """Reads one request as it grows, every part of it once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._samples = [(sample, Seen()) for sample in request.all_samples]
        self._num_prompt_logprobs = -1  # none have been read, not even an empty list
        self._is_begun = False

    def output(self) -> RequestOutput:
        """Return what is new; the first output alone has the prompt, and has every sample."""
        request = self._request
        is_first = not self._is_begun
        self._is_begun = True
        first = self._samples[0][0]
        prompt_logprobs = None
        has_more = len(first.prompt_logprobs) != self._num_prompt_logprobs
        if request.params.prompt_logprobs is not None and has_more:
            prompt_logprobs = list(first.prompt_logprobs)
            self._num_prompt_logprobs = len(prompt_logprobs)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt if is_first else None,
            prompt_token_ids=list(request.prompt_token_ids) if is_first else [],
            outputs=[_piece(*each) for each in self._samples] if is_first else list(self.new()),
            finished=request.is_finished,
            seed=first.sampling.seed if request.params.temperature > 0 else request.params.seed,
            prompt_logprobs=prompt_logprobs,
        )

    def new(self) -> Iterator[CompletionOutput]:
        """Yield a piece of each sample that has grown or ended."""
        for sample, seen in self._samples:
            if seen.is_over:
                continue
            piece = _piece(sample, seen)
            if piece.text or piece.token_ids or piece.stats.num_rounds or seen.is_over:
                yield piece


def whole_output(request: Request) -> RequestOutput:
    return Pieces(request).output()


def _piece(sample: Request, seen: Seen) -> CompletionOutput:
    text = sample.text()
    piece = CompletionOutput(
        index=sample.index,
        text=text[seen.num_chars :],
        token_ids=sample.token_ids[seen.num_tokens :],
        stats=sample.stats.since(seen.num_rounds),
    )
    if sample.finish is not None:
        piece.finish_reason = sample.finish.reason
        piece.stop_reason = sample.finish.stop_reason
    if sample.params.logprobs is not None:
        piece.logprobs = sample.logprobs[seen.num_tokens :]
        for token, found in zip(piece.token_ids, piece.logprobs, strict=True):
            seen.cumulative_logprob += found[token].logprob
        piece.cumulative_logprob = seen.cumulative_logprob
    seen.num_chars = len(text)
    seen.num_tokens = len(sample.token_ids)
    seen.num_rounds = sample.stats.num_rounds
    seen.is_over = sample.finish is not None
    return piece
