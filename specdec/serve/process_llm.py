"""ProcessLLM has AsyncLLM's interface to an engine in another process, as a server needs it."""

from typing import Any

from specdec.requests.metrics import Metric
from specdec.requests.params import SamplingParams
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.engine_facts import EngineFacts
from specdec.serve.engine_process import EngineProcess, EngineStart
from specdec.serve.worker_process import WorkerProcess


class ProcessLLM(AsyncEngine):
    """Waits until the engine is loaded, and raises what loading raises.

    worker: a process that has begun already.
    """

    def __init__(self, start: EngineStart, worker: WorkerProcess | None = None) -> None:
        self._process = EngineProcess(start, worker)
        super().__init__(self._process)

    @property
    def facts(self) -> EngineFacts:
        """Tell what a server has to know of the engine."""
        return self._process.facts

    async def check_grammar(self, params: SamplingParams) -> None:
        """Compile the grammar of structured outputs, so that no step waits; ValueError if bad.

        GrammarsBusyError, which is one, if no new grammar is taken for the moment.
        """
        await self._ask("check_grammar", params)

    async def get_metrics(self) -> list[Metric]:
        """List counts since the start, and what runs now (specdec.requests.metrics)."""
        found: list[Metric] = await self._ask("metrics")
        return found

    async def _ask(self, name: str, *given: object) -> Any:
        return await self._answer(lambda: self._process.ask(name, *given))
