"""A stage of Ray Data: lines of OpenAI's batch format in, their answers out. One engine an actor.

ray.data.read_text("in.jsonl").map_batches(
    EngineStage, fn_constructor_args=("demo", {"model": "demo"}), concurrency=2, num_gpus=1
)
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Unpack

import numpy as np

from specdec.arguments import from_mapping, refuse_unknown
from specdec.options import AsyncEngineArgs, EngineOptions, with_signature
from specdec.requests.chat_format import ChatFormat
from specdec.serve.async_llm import AsyncLLM
from specdec.serve.http.app import Application
from specdec.serve.http.batch import Answered, answer_line, read_line
from specdec.serve.http.options import NO_LIMIT, ServerOptions, is_api_key
from specdec.speculative_config import SpeculativeConfig

# Ray decides how long a replica may finish its requests
REPLICA_OPTIONS = {field.name for field in fields(ServerOptions)} - {"shutdown_timeout"}
# what there is to choose where there are no clients
STAGE_OPTIONS = (
    *("model_names", "chat_template", "use_generation_config", "ignore_unknown"),
    *("record", "trust_request_chat_template", "allow_priority"),
)


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """model, speculative_config, engine: arguments of AsyncLLM. server: fields of ServerOptions.

    They are checked here and sent to workers, which see whether the files are there.
    """

    model: str
    speculative_config: SpeculativeConfig | Mapping[str, object] | None
    engine: EngineOptions
    server: Mapping[str, object]

    def __post_init__(self) -> None:
        AsyncEngineArgs(self.model, self.speculative_config, **self.engine)
        refuse_unknown("server", self.server, REPLICA_OPTIONS)
        key = self.server.get("api_key")
        if key is not None and not is_api_key(key):
            raise ValueError("server: api_key: give a key of ASCII characters, or None")
        ChatFormat(chat_template=self._server_options().chat_template)

    @property
    def num_gpus(self) -> int:
        """Count an engine's GPUs. "auto" means a GPU here, since nodes of a cluster differ."""
        if str(self.engine.get("device", "auto")) == "cpu":
            return 0
        return int(self.engine.get("tensor_parallel_size", 1))

    def start(self) -> tuple[AsyncLLM, Application]:
        llm = AsyncLLM(self.model, self.speculative_config, **self.engine)
        return llm, Application(llm, self._server_options())

    def _server_options(self) -> ServerOptions:
        options = {"host": "localhost", "model_names": (self.model,), **self.server}
        record = options.get("record")
        options["record"] = None if record is None else Path(str(record))
        return from_mapping(ServerOptions, options)


class EngineStage:
    """Answers the lines of a batch together, for map_batches.

    column: of the lines, as text. server: fields of ServerOptions, out of STAGE_OPTIONS. The other
    arguments are those of AsyncLLM. A batch keeps its columns and gains `answer` (a line of the
    output, as text), `is_error` and `num_tokens`. ValueError for a column that is not there.
    """

    @with_signature
    def __init__(
        self,
        model: str,
        speculative_config: SpeculativeConfig | Mapping[str, object] | None = None,
        *,
        column: str = "text",
        server: Mapping[str, object] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        server = server or {}
        refuse_unknown("server", server, STAGE_OPTIONS)
        args = EngineArgs(model, speculative_config, options, {**server, "max_waiting": NO_LIMIT})
        self._column = column
        self._llm, application = args.start()
        self._app = application.app
        # as long as this object: the application keeps tasks and a process of its own
        self._loop = asyncio.Runner()
        self._lifespan = self._app.router.lifespan_context(self._app)
        self._loop.run(self._lifespan.__aenter__())

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, object]:
        """Answer a batch's lines. BatchStopped if the engine has failed, which ends the job."""
        if self._column not in batch:
            raise ValueError(f"column={self._column!r}: the batch has {', '.join(batch)}")
        answers = self._loop.run(self._answers(list(batch[self._column])))
        return {
            **batch,
            "answer": [each.line.decode() for each in answers],
            "is_error": [each.is_error for each in answers],
            "num_tokens": [each.num_tokens for each in answers],
        }

    async def _answers(self, lines: Sequence[str]) -> list[Answered]:
        read = (read_line(line.encode()) for line in lines)
        return await asyncio.gather(*(answer_line(self._app, line) for line in read))
