"""The public class: load a target and perhaps a draft, generate text."""

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

from graphs.counters import GraphCounters
from specdec.arguments import as_list, check_bool, refuse_unknown
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.from_vllm import ENGINE
from specdec.options import EngineOptions, with_signature
from specdec.requests.chat_format import ChatFormat, Conversation
from specdec.requests.intake import (
    NewRequest,
    Prompt,
    as_conversations,
    as_params,
    as_priorities,
    as_prompts,
    refuse_lora,
)
from specdec.requests.metrics import Metric
from specdec.requests.output import CompletionOutput, RequestOutput
from specdec.requests.params import RequestOutputKind, SamplingParams, recommended_params
from specdec.requests.request import Pieces, Request, whole_output
from specdec.requests.stats import SpeculationStats
from specdec.requests.turns import Turns
from specdec.speculative_config import SpeculativeConfig
from specdec.start.device import release_memory
from specdec.start.load import load
from weights.bars import bar


class LLM:
    """Generates from a target, sped up by the draft of `speculative_config`, with the same output.

    Several threads may call one LLM: they take turns, and each step serves the requests of all.
    `with LLM(...) as llm` calls shutdown() at the end.
    model: a local directory, a hub id, or a bundled pair, "demo" or "demo-experts". The
    other arguments are those of EngineConfig. ValueError for unknown or invalid arguments;
    weights.CheckpointError for invalid files.
    """

    @with_signature
    def __init__(
        self,
        model: str | Path,
        speculative_config: SpeculativeConfig | Mapping[str, object] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        refuse_unknown("LLM", options, EngineConfig.__dataclass_fields__, ENGINE)
        config = EngineConfig(**options)
        speculation = SpeculativeConfig.of(speculative_config)
        loaded = load(model, speculation, config)
        self.config = config
        self.speculative_config = speculation
        self.target_report = loaded.target.report
        self.draft_report = None if loaded.eagle is None else loaded.eagle.report
        self.tokenizer = loaded.tokenizer
        self.sizes = loaded.engine.runner.sizes
        self._engine: Engine | None = loaded.engine
        self._turns = Turns()  # the engine serves one thread at a time
        self._progress: list[Progress] = []  # of the running calls of generate

    @property
    def engine(self) -> Engine:
        """Return the engine; RuntimeError after shutdown()."""
        if self._engine is None:
            raise RuntimeError("this LLM was shut down: build another one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        *,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt (text or token ids) or several; outputs in the order of prompts.

        A prompt may also be an array of ids, {"prompt": text} or {"prompt_token_ids": ids}.
        sampling_params: one for all, or one per prompt. priority: one per prompt, lower goes first.
        All requests are checked before any runs; one that fails later ends with finish_reason
        "error", and the others continue. use_tqdm: show on a terminal how many requests are done,
        tokens per second and the acceptance length. Outputs are whole, whatever output_kind says.
        """
        check_bool("use_tqdm", use_tqdm)
        refuse_lora(lora_request)
        batch = as_prompts(prompts)
        params = as_params(sampling_params, len(batch))
        priorities = as_priorities(priority, len(batch))
        given = zip(batch, params, priorities, strict=True)
        requests = self._add(
            NewRequest(prompt=prompt, params=each, priority=first) for prompt, each, first in given
        )
        shown = Progress(requests, is_shown=use_tqdm)
        with self._aborting(requests), self._updating(shown) as progress:
            while not self._step_or_end(progress):
                pass
        return [whole_output(request) for request in requests]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role": ..., "content": ...}) or several.

        They are rendered by `chat_template` or the tokenizer's own; ValueError if there is neither.
        ChatFormat says what the other arguments mean.
        """
        self.engine.check_caller()
        refuse_lora(lora_request)
        form = ChatFormat(
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template_kwargs=chat_template_kwargs,
        )
        texts = [self.tokenizer.write_chat(each, form) for each in as_conversations(messages)]
        prompts: list[Prompt] = [
            {"prompt": text, "prompt_token_ids": self.tokenizer.encode_word(text)} for text in texts
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[CompletionOutput, None, RequestOutput]:
        """Generate for one prompt; yields the new text, token ids and logprobs of one sample.

        Joined, the texts of a sample are its whole text; with output_kind FINAL_ONLY each sample is
        one piece. The last piece of each sample has a finish_reason. Closing the iterator early
        aborts the request. The generator returns the whole output.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        [request] = self._add([NewRequest(prompt=prompt, params=params)])
        pieces = self._pieces(request)
        next(pieces)  # started, so that closing it before its first piece aborts the request too
        return pieces

    def _pieces(self, request: Request) -> Generator[CompletionOutput, None, RequestOutput]:
        reader = Pieces(request)
        is_whole = request.params.output_kind is RequestOutputKind.FINAL_ONLY
        with self._aborting([request]):
            yield CompletionOutput(index=0, text="", token_ids=[])  # for stream(), not its caller
            is_over = False
            while not is_over:
                # the turn ends before the caller runs; a request does not grow while it is read
                with self._turns:
                    if not request.is_finished and self._engine is not None:
                        self._step()
                    is_over = request.is_finished
                    pieces = list(reader.new()) if is_over or not is_whole else []
                yield from pieces
        return whole_output(request)

    def _add(self, new: Iterable[NewRequest]) -> list[Request]:
        with self._turns:
            return self.engine.add_requests(new)

    def _step_or_end(self, progress: "Progress") -> bool:
        """Take a turn of generate; True once its requests have ended, by any thread's steps."""
        with self._turns:
            if self._engine is None or not self._engine.has_unfinished:
                progress.update(progress.requests)
            elif not progress.is_complete:
                self._step()
            return progress.is_complete

    def _step(self) -> None:
        """Run a step for the requests of all threads, in a turn. An error ends all of them."""
        self.engine.runner.take_device()
        try:
            changed = self.engine.step()
        except BaseException:
            for progress in list(self._progress):
                progress.update(progress.requests, is_broken_off=True)
            raise
        for progress in list(self._progress):
            progress.update(changed)

    @contextmanager
    def _updating(self, progress: "Progress") -> "Iterator[Progress]":
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
        for request_id in request_ids if self._engine is not None else ():
            self.engine.abort(request_id)

    def graph_counters(self) -> dict[str, GraphCounters]:
        """Tell for each graph family the cost of capture, and the batches by mode and padded size.

        `counters.as_dict()` is JSON. Without graphs (on the CPU, with enforce_eager) all batches
        have mode NONE.
        """
        return self.engine.runner.graphs.counters()

    def get_tokenizer(self) -> Any:
        """Return a tokenizer of transformers, imported and read when first asked for."""
        return self.tokenizer.in_transformers

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the checkpoint's generation_config.json says, else the defaults."""
        return recommended_params(self.target_report.directory)

    def get_metrics(self) -> list[Metric]:
        """List counts since the start, and what runs now (specdec.requests.metrics)."""
        return self.engine.metrics()

    def shutdown(self) -> None:
        """Abort what runs and give the memory back. Outputs that were returned stay as they are."""
        with self._turns:
            if self._engine is not None:
                self._engine.abort_all()
                self._engine.end_ranks()
                self._engine = None
        self.tokenizer.close()
        release_memory()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    @staticmethod
    def run_stats(outputs: Sequence[RequestOutput]) -> SpeculationStats:
        """Merge the rounds of all outputs into one run."""
        found = as_list("outputs", outputs, "a list of RequestOutput")
        if not all(isinstance(each, RequestOutput) for each in found):
            raise ValueError(f"outputs={outputs!r}: give a list of RequestOutput")
        return SpeculationStats.merged(each.stats for each in cast(list[RequestOutput], found))


class Progress:
    """Counts the requests of a call that ended: done, tokens per second, acceptance length.

    is_shown: draw a bar, if there is a screen
    """

    def __init__(self, requests: Sequence[Request], is_shown: bool) -> None:
        self.requests = requests
        self._running = {request.request_id for request in requests}
        self._num_tokens = self._num_rounds = self._num_accepted = 0
        self._start = time.monotonic()
        self._bar = bar(total=len(requests), desc="generating", unit="request", is_wanted=is_shown)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    @property
    def is_complete(self) -> bool:
        return not self._running

    def update(self, changed: Iterable[Request], is_broken_off: bool = False) -> None:
        """Count the requests that a step ended; requests of other callers do not count.

        An abort is not shown as an end, nor is the end by a step that was interrupted.
        """
        for request in changed:
            if request.is_finished and request.request_id in self._running:
                self._running.remove(request.request_id)
                samples = request.all_samples
                is_aborted = any(each.finish and each.finish.reason == "abort" for each in samples)
                if not is_broken_off and not is_aborted:
                    self._count(samples)
                    self._bar.update()

    def _count(self, samples: Sequence[Request]) -> None:
        self._num_tokens += sum(sample.stats.num_generated_tokens for sample in samples)
        self._num_rounds += sum(sample.stats.num_rounds for sample in samples)
        self._num_accepted += sum(sample.stats.num_accepted_tokens for sample in samples)
        seconds = max(time.monotonic() - self._start, 1e-9)
        figures = {"tokens/s": f"{self._num_tokens / seconds:.0f}"}
        if self._num_accepted:
            figures["acceptance length"] = f"{1 + self._num_accepted / self._num_rounds:.2f}"
        self._bar.set_postfix(figures, refresh=False)
