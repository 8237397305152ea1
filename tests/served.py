"""A server in a process of its own, and a request over a connection that is kept."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection

Answer = tuple[float, str]  # seconds from the call to the first text, and the text


def post(connection: HTTPConnection, body: str) -> Answer:
    """Send one request over a connection that is kept, and read its stream."""
    sent, first, text = time.perf_counter(), 0.0, ""
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    for line in response:
        if response.status != 200 or b'"error"' in line:
            raise ValueError(f"the server says: {line.decode()}")
        if line.startswith(b"data: {"):
            text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
            first = first or (time.perf_counter() - sent if text else 0.0)
    return first or time.perf_counter() - sent, text


@contextmanager
def served(target: str, draft: str | None, *options: str) -> Iterator[str]:
    """Run a server in a process of its own; give its host and port."""
    words = [sys.executable, "-m", "specdec", "serve", target, "--port", "0", *options]
    words += [] if draft is None else ["--draft", draft]
    with tempfile.NamedTemporaryFile("r") as log, open(log.name, "w") as out:
        process = subprocess.Popen(words, stderr=out)
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
