"""`specdec serve`: what it refuses before it imports torch, and its log."""

import json
import logging
import os
from socket import socket

from specdec.arguments import from_mapping
from specdec.cli.before_torch import check_models
from specdec.cli.choices import BatchOptions, ServeOptions
from specdec.cli.options import check_choice
from specdec.cli.speculation import draft_of
from specdec.requests.chat_format import ChatFormat
from specdec.requests.chat_template import check_template
from specdec.serve.http.address import listen
from specdec.serve.http.options import ServerOptions, is_api_key
from specdec.serve.http.tools.formats import REASONING_PARSERS, TOOL_CALL_PARSERS

LOG_FORMATS = ("text", "json")


def checked_address(options: ServeOptions) -> socket:
    """Take the address; ValueError for anything that can be known to be wrong by now."""
    server = server_options(options)
    # typer takes an empty variable for none, which would open a server that was meant to be locked
    key = os.environ.get("SPECDEC_API_KEY") if server.api_key is None else server.api_key
    if key is not None and not is_api_key(key):
        raise ValueError("--api-key: give a key of ASCII characters, or leave it out")
    check_choice("--log-format", options.log_format, LOG_FORMATS)
    check_choice("--tool-call-parser", server.tool_call_parser, TOOL_CALL_PARSERS)
    check_choice("--reasoning-parser", server.reasoning_parser, REASONING_PARSERS)
    set_up_server_logging(options.log_format)
    check_models(options.target, draft_of(options.speculation))
    return listen(server.host, options.port)


def server_options(options: ServeOptions | BatchOptions) -> ServerOptions:
    """Build the server's config, and check its chat template."""
    server = from_mapping(ServerOptions, {"model_names": (options.target,), **options.server})
    ChatFormat(chat_template=server.chat_template)
    check_template(server.chat_template)
    return server


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
