"""Servers in processes of their own, and requests over connections that are kept."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from queue import SimpleQueue
from typing import Any

JSON = {"Content-Type": "application/json"}
Answer = tuple[float, str]  # seconds from the call to the first text, and the text


def post(connection: HTTPConnection, body: str) -> Answer:
    """Send one request over a connection that is kept, and read its stream."""
    sent, first, text = time.perf_counter(), 0.0, ""
    connection.request("POST", "/v1/completions", body, JSON)
    response = connection.getresponse()
    for line in response:
        if response.status != 200 or b'"error"' in line:
            raise ValueError(f"the server says: {line.decode()}")
        if line.startswith(b"data: {"):
            text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
            first = first or (time.perf_counter() - sent if text else 0.0)
    return first or time.perf_counter() - sent, text


def closed_loop(
    addresses: Sequence[str], bodies: Sequence[str], batch: int
) -> list[tuple[dict[str, Any], float]]:
    """Send all to the addresses in turn, `batch` at a time; give each answer and its seconds."""
    idle: SimpleQueue[HTTPConnection] = SimpleQueue()
    for i in range(batch):
        idle.put(HTTPConnection(addresses[i % len(addresses)]))

    def ask(body: str) -> tuple[dict[str, Any], float]:
        connection, began = idle.get(), time.perf_counter()
        try:
            connection.request("POST", "/v1/completions", body, JSON)
            found = json.load(connection.getresponse())
        finally:
            idle.put(connection)
        if "choices" not in found:
            raise ValueError(f"the server says: {found}")
        return found, time.perf_counter() - began

    with ThreadPoolExecutor(batch) as threads:
        return list(threads.map(ask, bodies))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def served(
    target: str, draft: str | None, *options: str, gpus: Sequence[str] | None = None
) -> Iterator[str]:
    """Run a server in a process of its own; give its host and port. gpus: that it sees"""
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    words = [sys.executable, "-m", "specdec", "serve", target, "--port", "0", *options]
    words += [] if draft is None else ["--draft", draft]
    with tempfile.NamedTemporaryFile("r") as log, open(log.name, "w") as out:
        process = subprocess.Popen(words, stderr=out, env=os.environ | visible)
        try:
            said = ""
            while not (found := re.search(r"serving .* at http://(\S+)/v1", said)):
                if process.poll() is not None:
                    raise SystemExit(said)
                time.sleep(0.1)
                said += log.read()
            yield found[1]
        finally:
            process.terminate()
            process.wait()
