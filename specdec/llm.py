"""The public class: load a target and perhaps a draft, generate text."""

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
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
    """Generates from a target, with the drafts of `speculative_config` if given; they never change the output.

    Several threads may call one LLM: they take turns at the steps, and each step goes on with the requests of all.
    model: a local directory, a hub id, or "demo", the bundled pair. The other arguments are those of EngineConfig.
    ValueError for arguments that are unknown or do not fit; weights.CheckpointError for files that do not.
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
        self._turns = Turns()  # of threads: the engine serves one at a time
        self._progress: list[Progress] = []  # of the calls of generate that run

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt (text or token ids) or several; results in the order of the prompts.

        sampling_params: one for all, or one per prompt. priority: one per prompt, lower goes first. All requests are
        checked before any runs; one that fails later ends with finish_reason "error", and the others go on.
        use_tqdm: show on a terminal how many are done, tokens per second and the acceptance length.
        """
        check_bool("use_tqdm", use_tqdm)
        batch = _as_batch(prompts)
        params = _as_params(sampling_params, len(batch))
        priorities = _as_priorities(priority, len(batch))
        asked = [
            NewRequest(prompt=prompt, params=each, priority=first)
            for prompt, each, first in zip(batch, params, priorities, strict=True)
        ]
        requests = self._add(asked)
        is_shown = use_tqdm and sys.stderr.isatty()
        with (
            self._aborted_on_error(requests),
            self._watching(Progress(requests, is_shown=is_shown)) as progress,
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

        The tokenizer's chat template writes them, or `chat_template`, Jinja text. ValueError where there is neither.
        """
        self.engine.check_caller()
        encode = self.tokenizer.encode_chat
        prompts = [
            encode(each, add_generation_prompt, chat_template)
            for each in _as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[CompletionOutput, None, RequestOutput]:
        """Generate for one prompt and yield what is new as rounds commit: text, token ids and logprobs of one sample.

        Joined, the texts of a sample are its whole text. The last piece of each has a finish_reason. Leaving the
        iterator early aborts the request. The generator's return value is the whole output.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        [request] = self._add([NewRequest(prompt=prompt, params=params)])
        pieces = self._pieces(request)
        next(
            pieces
        )  # the generator has begun, so that leaving it aborts the request before its first piece too
        return pieces

    def _pieces(self, request: Request) -> Generator[CompletionOutput, None, RequestOutput]:
        deltas = Deltas(request)
        with self._aborted_on_error([request]):
            yield CompletionOutput(
                index=0, text="", token_ids=[]
            )  # for stream(), not for its caller
            is_over = False
            while not is_over:
                # no turn lasts while the caller has the word, nor does a request grow while it is read
                with self._turns:
                    if not request.is_finished:
                        self._step()
                    pieces, is_over = list(deltas.new()), request.is_finished
                yield from pieces
        return request.output()

    def _add(self, asked: Sequence[NewRequest]) -> list[Request]:
        with self._turns:
            return self.engine.add_requests(asked)

    def _step_or_end(self, progress: Progress) -> bool:
        """A turn of generate; True where its requests have ended, by whichever thread's steps."""
        with self._turns:
            if not self.engine.has_unfinished:
                progress.update(progress.requests)
            elif not progress.is_complete:
                self._step()
            return progress.is_complete

    def _step(self) -> None:
        """In a turn: a step for the requests of all threads. An error ends them all, and the other threads return."""
        self.engine.runner.take_device()
        try:
            changed = self.engine.step()
        except BaseException:
            for progress in list(self._progress):
                progress.update(progress.requests)
            raise
        for progress in list(self._progress):
            progress.update(changed)

    @contextmanager
    def _watching(self, progress: Progress) -> Iterator[Progress]:
        """Tell it of the steps of all threads."""
        with progress:
            with self._turns:
                self._progress.append(progress)
                progress.update(progress.requests)  # what other threads have ended by now
            try:
                yield progress
            finally:
                self._progress.remove(progress)

    @contextmanager
    def _aborted_on_error(self, requests: Sequence[Request]) -> Iterator[None]:
        """However the body ends, none of its requests runs on."""
        try:
            yield
        finally:
            self._turns.call_soon(
                partial(self._abort, [each.request_id for each in requests if not each.is_finished])
            )

    def _abort(self, request_ids: Sequence[str]) -> None:
        """In a turn."""
        for request_id in request_ids:
            self.engine.abort(request_id)

    def graph_counters(self) -> dict[str, GraphCounters]:
        """What the CUDA graphs of each family took, and which batches they served, padded to which sizes, so far.

        `counters.as_dict()` is JSON. Without graphs (on the CPU, with enforce_eager) all batches are of mode NONE.
        """
        return self.engine.runner.graphs.counters()

    @staticmethod
    def run_stats(outputs: Sequence[RequestOutput]) -> SpeculationStats:
        """The rounds of all outputs as one run."""
        wanted = "a list of RequestOutput"
        found = as_list("outputs", outputs, wanted)
        if not all(isinstance(each, RequestOutput) for each in found):
            raise ValueError(f"outputs={outputs!r}: give {wanted}")
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
    """A list that begins with a list is several conversations; whether each is one is checked where it is encoded."""
    is_several = (
        isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple)
    )
    return (
        list(cast(Sequence[Conversation], messages))
        if is_several
        else [cast(Conversation, messages)]
    )


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
    return cast(list[SamplingParams], params)  # each is checked where its request is made


def _as_priorities(priority: Sequence[int] | None, count: int) -> list[int]:
    if priority is None:
        return [0] * count
    wanted = f"a list of {count} integers, one for each prompt, or None"
    priorities = as_list("priority", priority, wanted)
    if len(priorities) != count or not all(map(is_integer, priorities)):
        raise ValueError(f"priority={priority!r}: give {wanted}")
    return cast(list[int], priorities)
