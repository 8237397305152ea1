"""Servers of the bundled pair, each in a thread of its own."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx2
import pytest
from openai import DefaultHttpxClient, OpenAI

from specdec import AsyncLLM
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.engine_process import EngineProcess, EngineStart
from specdec.serve.http.options import ServerOptions, listen
from specdec.serve.http.server import Server
from tests.specdec.serve.http.described import Described

DRAFT = {"model": "demo", "num_speculative_tokens": 3}
SIZES = {"device": "cpu", "max_num_seqs": 16, "max_model_len": 512}


class LiveServer:
    """url: where it listens. server, llm: for reading. described: checks all exchanges."""

    def __init__(self, llm: AsyncEngine, **options: object) -> None:
        self.llm = llm
        chosen = {"host": "127.0.0.1", "model_names": ("demo",), **options}
        self._is_ready = threading.Event()
        self.described = Described(ServerOptions(**chosen))
        self.server = Server(llm, ServerOptions(**chosen), self._is_ready.set)
        self._address = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._address.getsockname()[1]}"
        self._client = httpx2.Client(
            base_url=self.url, timeout=60, event_hooks=self.described.hooks()
        )
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._address:
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.server.serve(sockets=[self._address])

    def start(self) -> None:
        """Return when it listens."""
        self._thread.start()
        assert self._is_ready.wait(60)

    def drain(self) -> None:
        """Drain as SIGTERM does."""
        self._loop.call_soon_threadsafe(self.server.drain)

    def stop(self) -> None:
        """Drain and wait."""
        self._client.close()
        if self._thread.is_alive():
            self.drain()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def post(
        self, path: str, body: object = None, timeout: float = 60, **more: object
    ) -> httpx2.Response:
        """A request of JSON, or of `content`."""
        content = {} if "content" in more else {"json": body}
        return self._client.post(path, timeout=timeout, **content, **more)

    def get(self, path: str, **more: object) -> httpx2.Response:
        """A request without a body."""
        return self._client.get(path, **more)

    def completion(self, prompt: object, **fields: object) -> dict:
        """The answer to a completion that works."""
        found = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert found.status_code == 200, found.text
        return found.json()

    def run(self, coroutine: Coroutine) -> object:
        """The result of a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def openai(self) -> OpenAI:
        """Return a client of the openai package. What it sends and gets is checked."""
        http = DefaultHttpxClient(event_hooks=self.described.hooks())
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=http)

    def until_idle(self) -> None:
        """Wait until nothing runs and all blocks are free."""
        traffic = self.server.application.traffic
        end = time.monotonic() + 30
        while self._is_busy() or traffic.num_requests:
            assert time.monotonic() < end, "a request is stuck, or blocks are lost"
            time.sleep(0.005)

    def _is_busy(self) -> bool:
        metrics = {each.name: each for each in self.run(self.llm.get_metrics())}
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return any(metrics[f"specdec:{name}"].value > 0 for name in names)


@contextmanager
def serving(
    sizes: dict[str, object] | None = None,
    model: str | Path = "demo",
    is_apart: bool = False,
    **options: object,
) -> Iterator[LiveServer]:
    """A server that ends with its engine. sizes: of the engine. is_apart: it has a process."""
    sizes = {**SIZES, **(sizes or {})}
    start = partial(EngineStart, set_up=str, loaded=str)  # nothing, and nothing
    with (
        AsyncEngine(EngineProcess(start(model=model, speculative_config=DRAFT, options=sizes)))
        if is_apart
        else AsyncLLM(model, DRAFT, **sizes)
    ) as engine:
        live = LiveServer(engine, **options)
        live.start()
        try:
            yield live
        finally:
            live.stop()


@pytest.fixture(scope="session")
def serve() -> Callable[..., object]:
    """serve(**options): a server for one test or module."""
    return serving


@pytest.fixture(scope="package")
def live() -> Iterator[LiveServer]:
    """A server with the default options, for tests that leave it whole."""
    with serving() as found:
        yield found


@pytest.fixture(scope="package")
def trusting() -> Iterator[LiveServer]:
    """A server that runs what requests bring."""
    with serving(trust_request_chat_template=True, allow_priority=True) as found:
        yield found
