"""How a request has grown, from the process that has the engine to the one that answers.

`Reporter` reads a request there, `Account` puts its outputs together here: the same ones that
Request.output makes, at a cost that does not grow with what was written before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.requests.deltas import Deltas
from specdec.requests.output import CompletionOutput, Logprob, RequestOutput
from specdec.requests.request import Request
from specdec.requests.stats import RequestStats, RoundRecord

COUNTS = (
    "acceptance",
    "num_prompt_tokens",
    "num_generated_tokens",
    "num_cached_tokens",
    "num_preemptions",
    "arrival_time",
    "first_token_time",
    "last_token_time",
)


class Beginning(NamedTuple):
    """What a request is, sent once."""

    prompt: str | None
    prompt_token_ids: list[int]
    num_samples: int
    seed: int | None
    has_logprobs: bool


class News(NamedTuple):
    """Of one request.

    pieces: what samples have written. rounds: of each sample, those since the last news; counts: of
    each sample, the fields COUNTS of its statistics. prompt_logprobs: where they have changed.
    """

    request_id: str
    beginning: Beginning | None
    pieces: list[CompletionOutput]
    rounds: list[list[RoundRecord]]
    counts: list[tuple[object, ...]]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    is_finished: bool


class Reporter:
    """Reads the news of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._deltas = Deltas(request)
        self._samples = request.all_samples
        self._num_rounds = [0] * len(self._samples)
        self._num_prompt_logprobs = 0
        self._has_begun = False

    def news(self) -> News:
        """Since the last time."""
        request = self._request
        beginning = None if self._has_begun else self._beginning()
        prompt_logprobs = self._new_prompt_logprobs()
        self._has_begun = True
        return News(
            request_id=request.request_id,
            beginning=beginning,
            pieces=list(self._deltas.new()),
            rounds=[self._new_rounds(i) for i in range(len(self._samples))],
            counts=[tuple(getattr(each.stats, n) for n in COUNTS) for each in self._samples],
            prompt_logprobs=prompt_logprobs,
            is_finished=request.is_finished,
        )

    def _beginning(self) -> Beginning:
        request = self._request
        seed = self._samples[0].sampling.seed if request.params.temperature > 0 else None
        return Beginning(
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            num_samples=len(self._samples),
            seed=request.params.seed if seed is None else seed,
            has_logprobs=request.params.logprobs is not None,
        )

    def _new_rounds(self, i: int) -> list[RoundRecord]:
        new = self._samples[i].stats.rounds_after(self._num_rounds[i])
        self._num_rounds[i] += len(new)
        return new

    def _new_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self._request.params.prompt_logprobs is None:
            return None
        found = self._samples[0].prompt_logprobs
        if self._has_begun and len(found) == self._num_prompt_logprobs:
            return None
        self._num_prompt_logprobs = len(found)
        return found


@dataclass(slots=True)
class Sample:
    """What has arrived of one sample."""

    output: CompletionOutput
    stats: RequestStats = field(default_factory=RequestStats)

    def take(self, rounds: Sequence[RoundRecord], counts: Sequence[object]) -> None:
        """New rounds, and the counts as they are now."""
        for record in rounds:
            self.stats.add_round(record)
        for name, value in zip(COUNTS, counts, strict=True):
            setattr(self.stats, name, value)

    def add(self, piece: CompletionOutput) -> None:
        """What it has written."""
        output = self.output
        output.text += piece.text
        output.token_ids += piece.token_ids
        output.finish_reason = piece.finish_reason
        output.stop_reason = piece.stop_reason
        if output.logprobs is not None and output.cumulative_logprob is not None:
            new = piece.logprobs or []
            output.logprobs += new
            for token, found in zip(piece.token_ids, new, strict=True):  # in Request's order
                output.cumulative_logprob += found[token].logprob

    def snapshot(self) -> CompletionOutput:
        """A copy that does not grow."""
        now = self.output
        return CompletionOutput(
            index=now.index,
            text=now.text,
            token_ids=list(now.token_ids),
            finish_reason=now.finish_reason,
            stop_reason=now.stop_reason,
            logprobs=None if now.logprobs is None else list(now.logprobs),
            cumulative_logprob=now.cumulative_logprob,
        )


def _sample(index: int, beginning: Beginning) -> Sample:
    if not beginning.has_logprobs:
        return Sample(CompletionOutput(index, "", []))
    return Sample(CompletionOutput(index, "", [], logprobs=[], cumulative_logprob=0.0))


class Account:
    """One request as its news tell it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.is_finished = False
        self._beginning: Beginning | None = None
        self._samples: list[Sample] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def take(self, news: News) -> None:
        """The next news; the first ones have the beginning."""
        if news.beginning is not None:
            self._beginning = news.beginning
            self._samples = [_sample(i, news.beginning) for i in range(news.beginning.num_samples)]
        for sample, rounds, counts in zip(self._samples, news.rounds, news.counts, strict=True):
            sample.take(rounds, counts)
        for piece in news.pieces:
            self._samples[piece.index].add(piece)
        if news.prompt_logprobs is not None:
            self._prompt_logprobs = news.prompt_logprobs
        self.is_finished = news.is_finished

    def output(self) -> RequestOutput:
        """A snapshot, as Request.output makes it."""
        assert self._beginning is not None, "no news yet"
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._beginning.prompt,
            prompt_token_ids=list(self._beginning.prompt_token_ids),
            outputs=[sample.snapshot() for sample in self._samples],
            finished=self.is_finished,
            stats=RequestStats.of_samples([sample.stats for sample in self._samples]),
            seed=self._beginning.seed,
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
        )
