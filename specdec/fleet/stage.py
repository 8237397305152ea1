"""A stage of Ray Data: lines of OpenAI's batch format in, their answers out. One engine an actor.

ray.data.read_text("in.jsonl").map_batches(
    EngineStage, fn_constructor_args=("demo", {"model": "demo"}), concurrency=2, num_gpus=1
)
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Unpack

import numpy as np

from specdec.arguments import refuse_unknown
from specdec.fleet.engine_args import EngineArgs
from specdec.options import EngineOptions, with_signature
from specdec.serve.http.batch import Answered, answer_line, read_line
from specdec.serve.http.options import NO_LIMIT
from specdec.speculative_config import SpeculativeConfig

# what there is to choose where there are no clients
SERVER_OPTIONS = (
    *("model_names", "chat_template", "use_generation_config", "ignore_unknown"),
    *("record", "trust_request_chat_template", "allow_priority"),
)


class EngineStage:
    """Answers the lines of a batch together, for map_batches.

    column: of the lines, as text. server: fields of ServerOptions, out of SERVER_OPTIONS. The other
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
        refuse_unknown("server", server or {}, SERVER_OPTIONS)
        args = EngineArgs(
            model=model,
            speculative_config=speculative_config,
            engine=options,
            server={**(server or {}), "max_waiting": NO_LIMIT},
        )
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
            given = ", ".join(batch)
            raise ValueError(f"column={self._column!r}: the batch has {given}")
        answers = self._loop.run(self._answers(list(batch[self._column])))
        return {
            **batch,
            "answer": [each.line.decode() for each in answers],
            "is_error": [each.is_error for each in answers],
            "num_tokens": [each.num_tokens for each in answers],
        }

    async def _answers(self, lines: Sequence[str]) -> list[Answered]:
        return await asyncio.gather(
            *(answer_line(self._app, read_line(line.encode())) for line in lines)
        )
