"""A request on the host: its prompt, its tokens and text so far, and where it lives in the state and the cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.requests.finish import Finish, FinishRules, find_finish, num_certain_chars
from specdec.requests.output import CompletionOutput, Logprob, RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.row_start import SamplingStart
from specdec.requests.stats import RequestStats, RoundRecord
from specdec.requests.tokenizer import Detokenizer


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sample. `samples`: all of the caller's request, itself included; number `index` has seed + index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    rules: FinishRules
    detokenizer: Detokenizer
    stats: RequestStats
    sampling: SamplingStart = field(default_factory=SamplingStart)
    index: int = 0
    samples: "list[Request]" = field(default_factory=list)
    priority: int = 0  # lower goes first
    number: int = 0  # in the order of arrival
    num_speculative_tokens: int = 0  # its own K

    # where it stands; the scheduler keeps these
    state_row: int = -1  # of the state, -1 = none
    blocks: list[int] = field(default_factory=list)
    context: Sequence[
        int
    ] = ()  # the prompt, and after a preemption what was generated; prefill computes all of it
    # but a generated last token, which the next round computes
    num_prefilled: int = 0  # tokens of the context that are computed or about to be
    num_in_flight: int = 0  # steps launched whose results are not taken yet
    least_pending: int = 0  # tokens that these will bring at least
    most_pending: int = 0  # and at most
    num_valid: int = 0  # positions that both caches are known to hold
    keys: list[bytes] = field(default_factory=list)  # of its whole blocks so far (prefix_keys.py)
    num_published: int = 0  # blocks whose contents the pool knows

    token_ids: list[int] = field(default_factory=list)
    ends: list[int] = field(
        default_factory=list
    )  # ends[i]: characters of text that token_ids[: i + 1] completed;
    # shorter than token_ids until somebody needs the text
    finish: Finish | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of token_ids, if asked for
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens; the last generated one is not computed yet."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def order(self) -> tuple[int, int]:
        """The order of priority and arrival: the least goes first."""
        return self.priority, self.number

    @property
    def is_ending(self) -> bool:
        """Whether it has ended, or what is in flight is sure to end it."""
        return (
            self.finish is not None
            or len(self.token_ids) + self.least_pending >= self.rules.max_tokens
        )

    def tokens(self, start: int, stop: int) -> list[int]:
        """Prompt and generated tokens from `start` up to `stop`."""
        P = len(self.prompt_token_ids)
        return [
            *self.prompt_token_ids[start:stop],
            *self.token_ids[max(start - P, 0) : max(stop - P, 0)],
        ]

    def append(self, tokens: list[int], now: float) -> None:
        """Take the tokens of a step, cut at the request's end; sets `finish` there. `now`: seconds, monotonic."""
        num_before = len(self.token_ids)
        self.token_ids += tokens
        if self.rules.stop_strings:
            self._complete_text()
        self.finish = find_finish(
            self.rules, self.token_ids, self.detokenizer.text, self.ends, num_before
        )
        if self.finish is not None:
            del self.token_ids[self.finish.num_tokens :]
            del self.logprobs[self.finish.num_tokens :]
        if self.stats.first_token_time is None:
            self.stats.first_token_time = now
        self.stats.last_token_time = now
        self.stats.num_generated_tokens = len(self.token_ids)

    def _complete_text(self) -> None:
        """Bring text and `ends` up to the last token: as each comes with stop strings, else when somebody looks."""
        for token in self.token_ids[len(self.ends) :]:
            self.detokenizer.push(token)
            self.ends.append(len(self.detokenizer.text))

    def end_without_candidates(self) -> None:
        """End where no token is left to be drawn, and say which parameters forbade them all."""
        params, count = self.params, len(self.token_ids)
        names = [name for name in ("allowed_token_ids", "bad_words") if getattr(params, name)]
        names += ["min_tokens"] if count < params.min_tokens else []
        self.end(
            "error",
            f"no token is left at position {count} of the output: forbidden by {', '.join(names)}",
        )

    def end(self, reason: str, message: str | None = None) -> None:
        """End here, for a reason that lies outside of the text."""
        count = len(self.token_ids)
        self.finish = Finish(
            reason=reason, num_tokens=count, num_text_tokens=count, stop_reason=message
        )

    def record_round(self, record: RoundRecord) -> None:
        """Count a round of this request; K is what it drafted."""
        self.stats.record(len(record.draft_tokens), record.num_accepted)
        self.stats.rounds.append(record)

    def output(self) -> RequestOutput:
        """A snapshot for the caller."""
        samples = self.samples or [self]
        first = samples[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[sample._completion() for sample in samples],
            finished=self.is_finished,
            stats=RequestStats.of_samples([sample.stats for sample in samples]),
            seed=first.sampling.seed if self.params.temperature > 0 else self.params.seed,
            prompt_logprobs=None
            if self.params.prompt_logprobs is None
            else list(first.prompt_logprobs),
        )

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return self.finish is not None and all(
            sample.finish is not None for sample in self.samples or [self]
        )

    def _completion(self) -> CompletionOutput:
        completion = CompletionOutput(
            index=self.index, text=self.text(), token_ids=list(self.token_ids)
        )
        if self.finish is not None:
            completion.finish_reason, completion.stop_reason = (
                self.finish.reason,
                self.finish.stop_reason,
            )
        if self.params.logprobs is not None:
            completion.logprobs = list(self.logprobs)
            pairs = zip(self.token_ids, self.logprobs, strict=True)
            completion.cumulative_logprob = sum(found[token].logprob for token, found in pairs)
        return completion

    def text(self) -> str:
        """While it runs, what is certain; at the end the full decode, or the text up to a stop string."""
        self._complete_text()
        if self.finish is None:
            return self.detokenizer.text[: num_certain_chars(self.rules, self.detokenizer.text)]
        if self.finish.num_chars is not None:
            return self.detokenizer.text[: self.finish.num_chars]
        return self.detokenizer.decode_all(self.finish.num_text_tokens)
