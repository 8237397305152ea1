"""`specdec serve`: its options, and what it refuses before it imports torch."""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from socket import socket

from specdec.cli.before_torch import check_models
from specdec.cli.generate import DraftOptions, speculation_of
from specdec.cli.options import check_choice
from specdec.requests.chat_format import ChatFormat
from specdec.requests.chat_template import check_template
from specdec.serve.http.address import listen
from specdec.serve.http.options import is_api_key
from specdec.serve.http.tools.formats import REASONING_PARSERS, TOOL_CALL_PARSERS

GENERATION_CONFIGS = ("auto", "none")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(DraftOptions):
    """Holds the command's options; see ServerOptions."""

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


def checked_address(options: ServeOptions) -> socket:
    """Take the address; ValueError for anything that can be known to be wrong by now."""
    _check(options)
    set_up_server_logging(options.log_format)
    speculation_of(options)
    check_models(options.target, options.draft, options.engine)
    return listen(options.host, options.port)


def _check(options: ServeOptions) -> None:
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


def set_up_server_logging(log_format: str) -> None:
    """Show the server's own lines unless SPECDEC_LOG says otherwise."""
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
