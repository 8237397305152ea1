"""What the operator of a server chooses, and the limits of every request."""

from dataclasses import dataclass
from pathlib import Path

MAX_BODY_BYTES = 8 << 20
MAX_DEPTH = 64  # of lists and objects in a body
MAX_KEYS = 1 << 13  # of one object in a body
MAX_VALUES = 1 << 17  # in a body, beside token ids: everything that reads a body walks over them
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


def is_api_key(key: object) -> bool:
    """Whether clients can send it in a header."""
    return isinstance(key, str) and key != "" and key.isascii()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """model_names: what a request may call the model; the first one is reported.

    chat_template: Jinja text, None: the tokenizer's own. use_generation_config: sampling defaults
    of the checkpoint. max_waiting: samples beyond those that run. record: a directory for the
    token ids of finished requests. shutdown_timeout: seconds that running requests get.
    tool_call_parser, reasoning_parser: the syntax of calls and of reasoning in answers, names of
    tools/formats.py; auto: by the chat template. parse_special: read special tokens in the text of
    requests as such.
    """

    host: str
    model_names: tuple[str, ...]
    api_key: str | None = None
    chat_template: str | None = None
    use_generation_config: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_waiting: int = 1024
    record: Path | None = None
    ignore_unknown: bool = False
    trust_request_chat_template: bool = False
    allow_priority: bool = False
    shutdown_timeout: float = 30.0
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    parse_special: bool = True
