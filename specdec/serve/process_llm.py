"""AsyncLLM's interface to an engine in another process, as far as a server needs it."""

import asyncio

from graphs.counters import GraphCounters
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
        """What a server has to know of the engine."""
        return self._process.facts

    async def check_grammar(self, params: SamplingParams) -> None:
        """Compile the grammar of structured outputs, so that no step waits; ValueError if bad.

        GrammarsBusyError, which is one, if no new grammar is taken for the moment.
        """
        await asyncio.wrap_future(self._process.ask("check_grammar", params))

    async def get_metrics(self) -> list[Metric]:
        """Counts since the start, and what runs now (specdec.requests.metrics)."""
        found: list[Metric] = await asyncio.wrap_future(self._process.ask("metrics"))
        return found

    async def graph_counters(self) -> dict[str, GraphCounters]:
        """What each family of CUDA graphs cost, and the batches that it served."""
        calls = self._process.ask("graph_counters")
        found: dict[str, GraphCounters] = await asyncio.wrap_future(calls)
        return found

    async def num_late_compilations(self) -> int:
        """Kernels that requests have waited for."""
        found: int = await asyncio.wrap_future(self._process.ask("num_late_compilations"))
        return found
