"""The public class: load a target and perhaps a draft, generate text."""

import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

from graphs.counters import GraphCounters
from specdec.arguments import as_list, check_bool, is_integer, refuse_unknown
from specdec.config import EngineConfig, SpeculativeConfig
from specdec.requests.deltas import Deltas
from specdec.requests.intake import NewRequest, Prompt
from specdec.requests.output import CompletionOutput, RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.progress import Progress
from specdec.requests.request import Request
from specdec.requests.stats import SpeculationStats
from specdec.requests.tokenizer import Conversation
from specdec.serve.turns import Turns
from specdec.start.load import load


class LLM:
    """Generates from a target, sped up by the draft of `speculative_config`, with the same output.

    Several threads may call one LLM: they take turns, and each step serves the requests of all.
    model: a local directory, a hub id, or "demo", the bundled pair. The other arguments are those
    of EngineConfig. ValueError for unknown or invalid arguments; weights.CheckpointError for
    invalid files.
    """

    def __init__(
        self,
        model: str | Path,
        speculative_config: SpeculativeConfig | Mapping[str, object] | None = None,
        **options: object,
    ) -> None:
        refuse_unknown("LLM", options, EngineConfig.__dataclass_fields__)
        config = EngineConfig(**options)  # type: ignore[arg-type]
        speculation = SpeculativeConfig.of(speculative_config)
        loaded = load(model, speculation, config)
        self.config = config
        self.speculative_config = speculation
        self.target_report = loaded.target.report
        self.draft_report = None if loaded.eagle is None else loaded.eagle.report
        self.tokenizer = loaded.tokenizer
        self.engine = loaded.engine
        self.sizes = self.engine.runner.sizes
        self._turns = Turns()  # the engine serves one thread at a time
        self._progress: list[Progress] = []  # of the running calls of generate

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt (text or token ids) or several; outputs in the order of prompts.

        sampling_params: one for all, or one per prompt. priority: one per prompt, lower goes first.
        All requests are checked before any runs; one that fails later ends with finish_reason
        "error", and the others continue. use_tqdm: show on a terminal how many requests are done,
        tokens per second and the acceptance length.
        """
        check_bool("use_tqdm", use_tqdm)
        batch = _as_batch(prompts)
        params = _as_params(sampling_params, len(batch))
        priorities = _as_priorities(priority, len(batch))
        requests = self._add(
            NewRequest(prompt=prompt, params=each, priority=first)
            for prompt, each, first in zip(batch, params, priorities, strict=True)
        )
        is_shown = use_tqdm and sys.stderr.isatty()
        with (
            self._aborting(requests),
            self._updating(Progress(requests, is_shown=is_shown)) as progress,
        ):
            while not self._step_or_end(progress):
                pass
        return [request.output() for request in requests]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role": ..., "content": ...}) or several.

        They are rendered by `chat_template` (Jinja text) or the tokenizer's own; ValueError if
        there is neither.
        """
        self.engine.check_caller()
        prompts = [
            self.tokenizer.encode_chat(each, add_generation_prompt, chat_template)
            for each in _as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[CompletionOutput, None, RequestOutput]:
        """Generate for one prompt; yields the new text, token ids and logprobs of one sample.

        Joined, the texts of a sample are its whole text. The last piece of each sample has a
        finish_reason. Closing the iterator early aborts the request. The generator returns the
        whole output.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        [request] = self._add([NewRequest(prompt=prompt, params=params)])
        pieces = self._pieces(request)
        next(pieces)  # started, so that closing it before its first piece aborts the request too
        return pieces

    def _pieces(self, request: Request) -> Generator[CompletionOutput, None, RequestOutput]:
        deltas = Deltas(request)
        with self._aborting([request]):
            yield CompletionOutput(index=0, text="", token_ids=[])  # for stream(), not its caller
            is_over = False
            while not is_over:
                # the turn ends before the caller runs; a request does not grow while it is read
                with self._turns:
                    if not request.is_finished:
                        self._step()
                    pieces = list(deltas.new())
                    is_over = request.is_finished
                yield from pieces
        return request.output()

    def _add(self, new: Iterable[NewRequest]) -> list[Request]:
        with self._turns:
            return self.engine.add_requests(new)

    def _step_or_end(self, progress: Progress) -> bool:
        """A turn of generate; True once its requests have ended, by any thread's steps."""
        with self._turns:
            if not self.engine.has_unfinished:
                progress.update(progress.requests)
            elif not progress.is_complete:
                self._step()
            return progress.is_complete

    def _step(self) -> None:
        """In a turn: a step for the requests of all threads. An error ends all of them."""
        self.engine.runner.take_device()
        changed: list[Request] | None = None  # as after an error: all
        try:
            changed = self.engine.step()
        finally:
            for progress in list(self._progress):
                progress.update(progress.requests if changed is None else changed)

    @contextmanager
    def _updating(self, progress: Progress) -> Iterator[Progress]:
        """Update it after the steps of all threads."""
        with progress:
            with self._turns:
                self._progress.append(progress)
                progress.update(progress.requests)  # other threads may have ended some already
            try:
                yield progress
            finally:
                self._progress.remove(progress)

    @contextmanager
    def _aborting(self, requests: Sequence[Request]) -> Iterator[None]:
        """Abort whatever is still running when the body exits."""
        try:
            yield
        finally:
            running = [each.request_id for each in requests if not each.is_finished]
            self._turns.call_soon(partial(self._abort, running))

    def _abort(self, request_ids: Sequence[str]) -> None:
        """In a turn."""
        for request_id in request_ids:
            self.engine.abort(request_id)

    def graph_counters(self) -> dict[str, GraphCounters]:
        """For each graph family: the cost of capture, and the batches by mode and padded size.

        `counters.as_dict()` is JSON. Without graphs (on the CPU, with enforce_eager) all batches
        have mode NONE.
        """
        return self.engine.runner.graphs.counters()

    @staticmethod
    def run_stats(outputs: Sequence[RequestOutput]) -> SpeculationStats:
        """The rounds of all outputs as one run."""
        found = as_list("outputs", outputs, "a list of RequestOutput")
        if not all(isinstance(each, RequestOutput) for each in found):
            raise ValueError(f"outputs={outputs!r}: give a list of RequestOutput")
        return SpeculationStats.merged(each.stats for each in cast(list[RequestOutput], found))


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = as_list("prompts", prompts, "text, a list of token ids, or a list of these")
    if items and all(map(is_integer, items)):
        return [cast(list[int], items)]
    batch: list[Prompt] = []
    for index, item in enumerate(items):
        if isinstance(item, int) or not isinstance(item, str | Sequence):
            raise ValueError(f"prompts[{index}] is {item!r}: give text or a list of token ids")
        batch.append(item)
    return batch


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """A list that begins with a list is several conversations; each is checked when encoded."""
    if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple):
        return list(cast(Sequence[Conversation], messages))
    return [cast(Conversation, messages)]


def _as_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling_params is None:
        return [SamplingParams()] * count
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    params = as_list("sampling_params", sampling_params, "SamplingParams, or a list of them")
    if len(params) != count:
        raise ValueError(
            f"{len(params)} sampling_params for {count} prompts: give one, or one for each"
        )
    return cast(list[SamplingParams], params)  # each is checked with its request


def _as_priorities(priority: Sequence[int] | None, count: int) -> list[int]:
    if priority is None:
        return [0] * count
    wanted = f"a list of {count} integers, one for each prompt, or None"
    priorities = as_list("priority", priority, wanted)
    if len(priorities) != count or not all(map(is_integer, priorities)):
        raise ValueError(f"priority={priority!r}: give {wanted}")
    return cast(list[int], priorities)
