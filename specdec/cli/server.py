"""`specdec serve`: an engine that answers OpenAI's API, until Ctrl-C or SIGTERM."""

import json
import logging
import os
import shlex
import sys
from functools import partial
from socket import socket

from specdec.cli.choices import ServeOptions
from specdec.cli.errors import set_up_logging
from specdec.cli.figures import say_what_runs
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.engine_process import EngineProcess, EngineStart
from specdec.serve.http.gate import LOOPBACK
from specdec.serve.http.options import ServerOptions
from specdec.serve.http.server import Server
from specdec.serve.worker_process import WorkerProcess


def run_server(
    options: ServeOptions, chosen: ServerOptions, address: socket, worker: WorkerProcess
) -> None:
    """Load and serve at an address that was taken. worker: the process for the engine."""
    set_up_server_logging(options.log_format)
    port = address.getsockname()[1]
    start = EngineStart(
        model=options.target,
        speculative_config=options.speculation,
        options=options.engine,
        set_up=partial(set_up_server_logging, options.log_format),
        loaded=say_what_runs,
    )
    with AsyncEngine(EngineProcess(start, worker)) as llm:
        server = Server(llm, chosen, partial(_announce, chosen, port))
        _say_what_is_special(chosen, server)
        server.run(sockets=[address])
    if server.has_lost_engine:  # so that what watches the server starts it again
        raise SystemExit(1)


def set_up_server_logging(log_format: str) -> None:
    """Set up a process; the server's own lines show unless SPECDEC_LOG says otherwise."""
    set_up_logging()
    if "SPECDEC_LOG" not in os.environ:
        logging.getLogger("specdec.serve").setLevel(logging.INFO)
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())


class JsonLines(logging.Formatter):
    """Formats each record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Give time in seconds, level, logger, message, and the traceback if there is one."""
        found = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info is not None:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found)


def _say_what_is_special(options: ServerOptions, server: Server) -> None:
    defaults = server.application.defaults
    if defaults:
        shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
        print(f"sampling defaults of the checkpoint: {shown}", file=sys.stderr)
    found = server.application.chats.format
    if found.calls is not None:
        print(f"calls of tools are read as {found.calls.name}", file=sys.stderr)
    if found.thinks:
        print("text in <think> is read as reasoning", file=sys.stderr)
    if options.record is not None:
        print(f"requests are recorded in {options.record}", file=sys.stderr)
    if options.host not in LOOPBACK and options.api_key is None:
        print(f"warning: {options.host} is open to all, without an --api-key", file=sys.stderr)


def _announce(options: ServerOptions, port: int) -> None:
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    name = options.model_names[0]
    body = json.dumps({"model": name, "prompt": "def f(x):", "temperature": 0})
    print(f"serving {name} at {url}/v1 (Ctrl-C stops)", file=sys.stderr)
    print(f"playground: {url}/", file=sys.stderr)
    key = "" if options.api_key is None else ' -H "x-api-key: $SPECDEC_API_KEY" \\\n '
    print(f"curl {url}/v1/completions \\\n {key} --json {shlex.quote(body)}", file=sys.stderr)
