"""An engine for asyncio: requests from any number of event loops, served by a background thread.

async with AsyncLLM("path/to/target", {"model": "path/to/eagle3"}) as llm:
    async for output in llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64)):
        print(output.outputs[0].text)
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

from graphs.counters import GraphCounters
from specdec.llm import LLM
from specdec.options import AsyncEngineArgs, EngineOptions, with_signature
from specdec.requests.chat_format import ChatFormat, Conversation
from specdec.requests.intake import NewRequest, Prompt
from specdec.requests.output import RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.tokenizer import Tokenizer
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.engine_thread import EngineThread
from specdec.speculative_config import SpeculativeConfig

LONG_TEXT = 4096  # characters that take longer to encode than a step


class AsyncLLM(AsyncEngine):
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
        self._thread = EngineThread(self.llm)
        super().__init__(self._thread)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> "AsyncLLM":
        """Build one from arguments that were collected, as in vLLM."""
        if not isinstance(engine_args, AsyncEngineArgs):
            raise ValueError(f"engine_args={engine_args!r}: give AsyncEngineArgs")
        return cls(engine_args.model, engine_args.speculative_config, **engine_args.options)

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
        if len(text) >= LONG_TEXT:
            ids = await asyncio.to_thread(self._encode, text, adds_special=False)
        else:  # in the engine's thread, which uses the tokenizer too
            ids = await self._answer(
                lambda: self._thread.call(partial(tokenizer.encode_word, text))
            )
        prompt: Prompt = {"prompt": text, "prompt_token_ids": ids}
        outputs = self.generate(prompt, sampling_params, request_id, priority)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def _prepared(self, new: NewRequest) -> NewRequest:
        """Encode a long text and compile a grammar here, so that no step waits for them."""
        text = new.prompt
        if isinstance(text, Mapping) and set(text) == {"prompt"}:
            text = text["prompt"]
        if isinstance(text, str) and len(text) >= LONG_TEXT:
            ids = await asyncio.to_thread(self._encode, text, adds_special=True)
            new = replace(new, prompt={"prompt": text, "prompt_token_ids": ids})
        if isinstance(new.params, SamplingParams) and new.params.structured_outputs is not None:
            await asyncio.to_thread(self.llm.engine.intake.guide, new.params)
        return new

    def _encode(self, text: str, adds_special: bool) -> list[int]:
        """Encode by a tokenizer of its own: holding the engine's would delay its texts."""
        return self._encoder.encode(text, adds_special)

    @cached_property
    def _encoder(self) -> Tokenizer:
        return Tokenizer(self.llm.tokenizer.directory)

    def get_tokenizer(self) -> Any:
        """Return a tokenizer of transformers; the engine may use it too: copy it before use."""
        return self.llm.get_tokenizer()

    async def graph_counters(self) -> dict[str, GraphCounters]:
        """Tell what each family of CUDA graphs cost, and which batches it served."""
        return await self._answer(lambda: self._thread.call(self.llm.graph_counters))
