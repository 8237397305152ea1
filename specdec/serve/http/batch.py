"""Lines of a batch file in OpenAI's format, answered by the application of the server.

A line's body goes through the application itself, in this process and without a socket, so it means
what it means over HTTP. What the application refuses is a line with its status; a line that cannot
reach it has an error instead of a response.
"""

import asyncio
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

from specdec.serve.http.bodies import parse
from specdec.serve.http.errors import ApiError, as_json
from specdec.serve.http.fields import CHAT, COMPLETION
from specdec.serve.http.structured import GRAMMARS_BUSY

URLS = (CHAT, COMPLETION)
KEYS = ("custom_id", "method", "url", "body")
HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]
UNAVAILABLE = 503
START = b'{"id":"batch_req_'  # of every answer
BEGINNING = re.compile(rb'\{"id": ?"batch_req_[0-9a-f]*')
BUSY_SECONDS = 1.0  # from one try of a line to the next, while no new grammar is taken


class BatchStopped(Exception):
    """The engine takes no more requests, so the remaining lines have no answer."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of the input. custom_id: None if it has none that can be read.

    problem: why it cannot be asked; url and body are empty then.
    """

    custom_id: str | None
    url: str = ""
    body: bytes = b""
    problem: str | None = None
    code: str = "invalid_line"


@dataclass(frozen=True, slots=True)
class Answered:
    """A line of the output, and what there is to count of it."""

    line: bytes
    is_error: bool
    num_tokens: int


def read_line(data: bytes) -> BatchLine:
    """Read one line as it was given."""
    try:
        given = parse(data)
    except ApiError as error:
        return BatchLine(None, problem=error.message.replace("the body", "the line", 1))
    if not isinstance(given, dict):
        return BatchLine(None, problem="the line is no JSON object")
    name = given.get("custom_id")
    custom_id = name if isinstance(name, str) else None
    problem = _problem(given)
    if problem is not None:
        return BatchLine(custom_id, problem=problem)
    return BatchLine(custom_id, given["url"], as_json(given["body"]))


def _problem(given: Mapping[str, object]) -> str | None:
    unknown = sorted(set(given) - set(KEYS))
    if unknown:
        return f"unknown {', '.join(unknown)!r:.200}: give {', '.join(KEYS)}"
    if not isinstance(given.get("custom_id"), str):
        return f"custom_id={given.get('custom_id')!r:.100}: give a string"
    if given.get("method") != "POST":
        return f"method={given.get('method')!r:.100}: give POST"
    if given.get("url") not in URLS:
        return f"url={given.get('url')!r:.100}: give {' or '.join(URLS)}"
    body = given.get("body")
    if not isinstance(body, dict):
        return f"body={body!r:.100}: give the JSON object of a request"
    if body.get("stream"):
        return "stream: a batch has whole answers, leave it out"
    return None


async def answer_line(app: ASGIApp, line: BatchLine) -> Answered:
    """Ask the application, again while it takes no new grammar.

    BatchStopped if its engine takes no more requests.
    """
    if line.problem is not None:
        return answer_problem(line)
    found = _answer(line)
    status, request_id, body = await _post(app, line.url, line.body)
    while status == UNAVAILABLE:
        if _error(body)["code"] != GRAMMARS_BUSY:
            raise BatchStopped(str(_error(body)["message"]))
        await asyncio.sleep(BUSY_SECONDS)
        status, request_id, body = await _post(app, line.url, line.body)
    found["response"] = {"status_code": status, "request_id": request_id, "body": body}
    usage = body.get("usage")
    num_tokens = usage["completion_tokens"] if isinstance(usage, dict) else 0
    return Answered(as_json(found), status != 200, num_tokens)


def answer_problem(line: BatchLine) -> Answered:
    """Write the answer to a line that cannot be asked."""
    error = {"code": line.code, "message": line.problem}
    return Answered(as_json({**_answer(line), "error": error}), True, 0)


def begins_answer(data: bytes, line: BatchLine) -> bool:
    """Say whether the bytes begin an answer to the line, with blanks or without."""
    found = BEGINNING.match(data)
    if found is None:
        return False
    names = as_json({"custom_id": line.custom_id, "response": ""})
    own = _without_blanks(b'",' + names.removeprefix(b"{").removesuffix(b'""}'))
    rest = _without_blanks(data[found.end() : found.end() + 2 * len(own)])
    length = min(len(own), len(rest))
    return rest[:length] == own[:length]


def _without_blanks(data: bytes) -> bytes:
    return re.sub(rb"(?<=[:,]) ", b"", data)


def _answer(line: BatchLine) -> dict[str, object]:
    """Make an answer with neither a response nor an error yet."""
    name = f"batch_req_{uuid.uuid4().hex}"
    return {"id": name, "custom_id": line.custom_id, "response": None, "error": None}


def _error(body: Mapping[str, object]) -> dict[str, object]:
    error = body["error"]
    assert isinstance(error, dict), error
    return error


async def _post(app: ASGIApp, path: str, body: bytes) -> tuple[int, str, dict[str, object]]:
    """Return the status, request id and JSON of an answer."""
    unread = [body]
    messages: list[Message] = []

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # this client does not leave
        raise AssertionError("an event that is set by nobody")

    async def send(message: Message) -> None:
        messages.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": HEADERS,
    }
    await app(scope, receive, send)
    start, *parts = messages
    request_id = dict(start["headers"])[b"x-request-id"].decode()
    data = b"".join(part.get("body", b"") for part in parts)
    return start["status"], request_id, json.loads(data)
