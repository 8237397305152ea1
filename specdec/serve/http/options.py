"""What the operator of a server chooses, its address, and the limits of every request.

All of it is known before anything large is imported or read.
"""

import socket
from dataclasses import dataclass, field
from pathlib import Path

from specdec.described import SERVERS, about, check_described, option

MAX_BODY_BYTES = 8 << 20
MAX_SAMPLES = 128  # n
MAX_CHOICES = 1024  # n times the number of prompts
MAX_LOGPROBS = 20
MAX_STOPS = 32
MAX_STOP_CHARS = 256  # of one stop string: the end of every text is searched for its beginnings
MAX_WORD_CHARS = 256  # of one of bad_words
MAX_IDS = 1024  # entries of logit_bias and stop_token_ids
MAX_ALLOWED_IDS = 1 << 16  # entries of allowed_token_ids
BODY_SECONDS = 60.0  # to receive a body in
NO_LIMIT = 1 << 30  # of max_waiting, where there are no clients
MOST_SECONDS = 1e9  # of a timeout


def is_api_key(key: object) -> bool:
    """Say whether clients can send it in a header."""
    return isinstance(key, str) and key != "" and key.isascii()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Says how a server listens and reads requests. The first of model_names is reported."""

    COMMANDS = ("serve",)

    host: str = option("127.0.0.1", "the address to listen at; 0.0.0.0: all")
    model_names: tuple[str, ...] = field(
        metadata=about(
            "what requests call the model; may be repeated",
            flag="--served-model-name",
            unset="TARGET",
            commands=SERVERS,
        )
    )
    api_key: str | None = option(None, "requests must send it", envvar="SPECDEC_API_KEY")
    chat_template: str | None = option(
        None,
        "Jinja text; on the command line a file of it",
        unset="the tokenizer's own",
        metavar="FILE",
        commands=SERVERS,
    )
    use_generation_config: bool = option(
        False,
        "auto: sampling defaults of the checkpoint; none",
        text="take sampling defaults from the checkpoint's generation_config.json",
        flag="--generation-config",
        words={"auto": True, "none": False},
        commands=SERVERS,
    )
    allowed_origins: tuple[str, ...] = option(
        (), "a web page's origin that may call; may be repeated", flag="--allowed-origin"
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "a name that this server is called by; may be repeated", flag="--allowed-host"
    )
    max_waiting: int = option(1024, "samples that may wait; others get 429", bounds=(0, NO_LIMIT))
    record: Path | None = field(
        default=None,
        metadata=about(
            "write token ids of finished requests to this directory", metavar="DIRECTORY"
        ),
    )
    ignore_unknown: bool = option(False, "ignore unknown fields of requests", commands=SERVERS)
    trust_request_chat_template: bool = option(False, "run chat templates that requests bring")
    allow_priority: bool = option(False, "let requests choose their priority")
    shutdown_timeout: float = option(
        30.0, "seconds that running requests get after SIGTERM or Ctrl-C", bounds=(0, MOST_SECONDS)
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes calls of tools: auto (by its chat template), hermes, llama3_json, "
        "qwen3_xml or none",
    )
    reasoning_parser: str = option(
        "auto", "how it writes reasoning: auto (by its chat template), think or none"
    )
    parse_special: bool = option(
        True,
        "whether special tokens in the text of requests are tokens, or text like any",
        flag="--parse-special/--no-parse-special",
    )

    def __post_init__(self) -> None:
        check_described(self)


def listen(host: str, port: int) -> socket.socket:
    """Take the address of a server; ValueError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends without delay (TCP_NODELAY) only where a socket names its protocol
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"host={host} and port={port}: {reason}; give another address") from error
    return found
