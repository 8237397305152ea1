"""`specdec serve`: an engine behind OpenAI's API, until Ctrl-C or SIGTERM."""

import json
import logging
import os
import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specdec.cli.errors import set_up_logging
from specdec.cli.generate import DraftOptions, speculation_of
from specdec.cli.headline import headline
from specdec.cli.options import check_choice
from specdec.cli.threads import choose_threads
from specdec.llm import LLM
from specdec.requests.chat_format import ChatFormat
from specdec.requests.chat_template import check_template
from specdec.serve.engine_process import EngineStart
from specdec.serve.http.gate import LOOPBACK
from specdec.serve.http.options import ServerOptions, is_api_key
from specdec.serve.http.server import Server, listen
from specdec.serve.http.tools.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from specdec.serve.process_llm import ProcessLLM
from specdec.serve.worker_process import WorkerProcess

GENERATION_CONFIGS = ("auto", "none")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(DraftOptions):
    """The command's options; see ServerOptions."""

    host: str
    port: int
    api_key: str | None
    served_model_names: list[str] | None
    chat_template: str | None
    generation_config: str
    allowed_origins: list[str] | None
    allowed_hosts: list[str] | None
    max_waiting: int
    record: Path | None
    ignore_unknown: bool
    trust_request_chat_template: bool
    allow_priority: bool
    shutdown_timeout: float
    log_format: str
    tool_call_parser: str
    reasoning_parser: str
    parse_special: bool


def run_serve(options: ServeOptions, worker: WorkerProcess) -> None:
    """Take the address, load, serve. worker: for the engine."""
    _check(options)
    _set_up_logging(options.log_format)
    speculation = speculation_of(options)
    with listen(options.host, options.port) as address:
        port = address.getsockname()[1]
        start = EngineStart(
            model=options.target,
            speculative_config=speculation,
            options=options.engine,
            set_up=partial(_set_up_engine, options.log_format),
            loaded=_say_what_runs,
        )
        with ProcessLLM(start, worker) as llm:
            server = Server(llm, _server_options(options), partial(_announce, options, port))
            _say_what_is_special(options, server)
            server.run(sockets=[address])
        if server.has_lost_engine:  # so that what watches the server starts it again
            raise SystemExit(1)


def _set_up_engine(log_format: str) -> None:
    """In the engine's process."""
    set_up_logging()
    _set_up_logging(log_format)


def _say_what_runs(llm: LLM) -> None:
    """In the engine's process."""
    print(headline(llm), file=sys.stderr)
    choose_threads(llm.engine.runner)


def _check(options: ServeOptions) -> None:
    """Before anything large is read."""
    # typer takes an empty variable for none, which would open a server that was meant to be locked
    key = os.environ.get("SPECDEC_API_KEY") if options.api_key is None else options.api_key
    if key is not None and not is_api_key(key):
        raise ValueError("--api-key: give a key of ASCII characters, or leave it out")
    check_choice("--generation-config", options.generation_config, GENERATION_CONFIGS)
    check_choice("--log-format", options.log_format, LOG_FORMATS)
    check_choice("--tool-call-parser", options.tool_call_parser, TOOL_CALL_PARSERS)
    check_choice("--reasoning-parser", options.reasoning_parser, REASONING_PARSERS)
    ChatFormat(chat_template=options.chat_template)
    check_template(options.chat_template)


def _server_options(options: ServeOptions) -> ServerOptions:
    return ServerOptions(
        host=options.host,
        model_names=tuple(options.served_model_names or [options.target]),
        api_key=options.api_key,
        chat_template=options.chat_template,
        use_generation_config=options.generation_config == "auto",
        allowed_origins=tuple(options.allowed_origins or ()),
        allowed_hosts=tuple(options.allowed_hosts or ()),
        max_waiting=options.max_waiting,
        record=options.record,
        ignore_unknown=options.ignore_unknown,
        trust_request_chat_template=options.trust_request_chat_template,
        allow_priority=options.allow_priority,
        shutdown_timeout=options.shutdown_timeout,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        parse_special=options.parse_special,
    )


def _say_what_is_special(options: ServeOptions, server: Server) -> None:
    """Defaults that come from the checkpoint, and what an operator should know."""
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


def _announce(options: ServeOptions, port: int) -> None:
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    name = (options.served_model_names or [options.target])[0]
    body = json.dumps({"model": name, "prompt": "def f(x):", "temperature": 0})
    print(f"serving {name} at {url}/v1 (Ctrl-C stops)", file=sys.stderr)
    print(f"playground: {url}/", file=sys.stderr)
    key = "" if options.api_key is None else ' -H "x-api-key: $SPECDEC_API_KEY" \\\n '
    print(f"curl {url}/v1/completions \\\n {key} --json {shlex.quote(body)}", file=sys.stderr)


def _set_up_logging(log_format: str) -> None:
    """The server's own lines are shown unless SPECDEC_LOG says otherwise."""
    if "SPECDEC_LOG" not in os.environ:
        logging.getLogger("specdec.serve").setLevel(logging.INFO)
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())


class JsonLines(logging.Formatter):
    """A line of JSON for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """Time in seconds, level, logger, message, and the traceback if there is one."""
        found = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info is not None:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found)
