"""An engine for asyncio: requests from any number of event loops, served by a background thread.

async with AsyncLLM("path/to/target", {"model": "path/to/eagle3"}) as llm:
    async for output in llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64)):
        print(output.outputs[0].text)
"""

import asyncio
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from graphs.counters import GraphCounters
from specdec.arguments import is_integer
from specdec.config import SpeculativeConfig
from specdec.llm import LLM
from specdec.options import EngineOptions, with_signature
from specdec.requests.chat_format import ChatFormat, Conversation
from specdec.requests.intake import NewRequest, Prompt
from specdec.requests.metrics import Metric
from specdec.requests.output import RequestOutput
from specdec.requests.params import SamplingParams
from specdec.serve.engine_thread import EngineDeadError, EngineThread


class AsyncLLM:
    """Takes the arguments of LLM. `llm` is for reading only: its calls to the engine are refused.

    After a failure of the engine or a shutdown, and in a forked child, every call raises
    EngineDeadError.
    """

    @with_signature
    def __init__(
        self,
        model: str | Path,
        speculative_config: SpeculativeConfig | Mapping[str, object] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.llm = LLM(model, speculative_config, **options)
        self._thread = EngineThread(self.llm.engine)
        # at the latest when this object is collected or the interpreter exits
        weakref.finalize(self, self._thread.close)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the whole output so far as it grows; the last one has finished=True.

        The request begins with the first iteration. A slow reader skips intermediate outputs and
        never delays others. Leaving early (a break with aclose(), a cancelled task) aborts the
        request. request_id: for `abort`; None draws one. priority: lower goes first. ValueError
        says what is wrong with the request.
        """
        _check_names(request_id, priority)
        name = uuid.uuid4().hex if request_id is None else request_id
        params = SamplingParams() if sampling_params is None else sampling_params
        new = NewRequest(prompt=prompt, params=params, priority=priority, request_id=name)
        mailbox = Mailbox(asyncio.get_running_loop())
        is_over = False
        try:
            await asyncio.wrap_future(self._thread.add(new, mailbox.put))
            while not is_over:
                output = await mailbox.get()
                is_over = output.finished
                yield output
        finally:
            if not is_over:
                self._thread.abort(name, mailbox.put)

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate` for one conversation, rendered as ChatFormat says."""
        tokenizer = self.llm.tokenizer
        form = ChatFormat(
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template_kwargs=chat_template_kwargs,
        )
        text = await asyncio.to_thread(tokenizer.write_chat, messages, form)
        # in the engine's thread, which uses the tokenizer too
        ids = await asyncio.wrap_future(self._thread.call(partial(tokenizer.encode_word, text)))
        prompt: Prompt = {"prompt": text, "prompt_token_ids": ids}
        outputs = self.generate(prompt, sampling_params, request_id, priority)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> bool:
        """End a request: its iterator gets a last output with finish_reason "abort".

        Returns False if no such request runs.
        """
        if not isinstance(request_id, str):
            raise ValueError(f"request_id={request_id!r}: give the string that names the request")
        return await asyncio.wrap_future(self._thread.abort(request_id))

    def get_tokenizer(self) -> Any:
        """The tokenizer of transformers. The engine's thread uses it too: copy it before use."""
        return self.llm.get_tokenizer()

    async def get_metrics(self) -> list[Metric]:
        """Counts since the start, and what runs now (specdec.requests.metrics)."""
        return await asyncio.wrap_future(self._thread.call(self.llm.engine.metrics))

    async def graph_counters(self) -> dict[str, GraphCounters]:
        """What each family of CUDA graphs cost, and the batches that it served."""
        return await asyncio.wrap_future(self._thread.call(self.llm.graph_counters))

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests: it has neither failed nor been shut down."""
        return self._thread.is_running

    def shutdown(self) -> None:
        """Abort what runs and end the thread, after its current step."""
        self._thread.close()

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.shutdown)


class Mailbox:
    """The latest output of one request, on its way from the engine's thread to an event loop.

    Outputs are cumulative, so a newer one replaces one that was not fetched: a slow reader costs no
    memory and is woken once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_full = asyncio.Event()
        self._lock = threading.Lock()
        self._latest: RequestOutput | EngineDeadError | None = None

    async def get(self) -> RequestOutput:
        """Wait for an output newer than the last one."""
        await self._is_full.wait()
        self._is_full.clear()
        with self._lock:
            latest, self._latest = self._latest, None
        assert latest is not None, "woken without an output"
        if isinstance(latest, EngineDeadError):
            raise latest
        return latest

    def put(self, item: RequestOutput | EngineDeadError) -> bool:
        """In the engine's thread. False if the loop is closed."""
        with self._lock:
            was_empty = self._latest is None
            self._latest = item
        if not was_empty:  # the loop is being woken already, if it is open
            return not self._loop.is_closed()
        try:
            self._loop.call_soon_threadsafe(self._is_full.set)
        except RuntimeError:  # the loop is closed
            return False
        return True


def _check_names(request_id: object, priority: object) -> None:
    if request_id is not None and not isinstance(request_id, str):
        raise ValueError(f"request_id={request_id!r}: give a string, or None for one that is drawn")
    if not is_integer(priority):
        raise ValueError(f"priority={priority!r}: give an integer, lower goes first")
