"""A server of the bundled pair for clients that tests run, in a thread."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from specdec import AsyncLLM
from specdec.serve.http.options import ServerOptions
from specdec.serve.http.server import Server


@contextmanager
def demo_server() -> Iterator[str]:
    """Yield the URL of a server that is ready; it ends with the context."""
    is_ready = threading.Event()
    address = socket.create_server(("127.0.0.1", 0))
    with AsyncLLM("demo", {"model": "demo"}, device="cpu", max_num_seqs=4) as llm:
        server = Server(llm, ServerOptions(host="127.0.0.1", model_names=("demo",)), is_ready.set)

        async def serve() -> None:
            asyncio.get_running_loop().call_soon(loops.append, asyncio.get_running_loop())
            await server.serve(sockets=[address])

        loops: list[asyncio.AbstractEventLoop] = []
        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        assert is_ready.wait(60)
        yield f"http://127.0.0.1:{address.getsockname()[1]}"
        loops[0].call_soon_threadsafe(server.drain)
        thread.join(60)
        address.close()
    assert not thread.is_alive()
