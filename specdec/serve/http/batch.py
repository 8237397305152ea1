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

from specdec.serve.http.api_request import GRAMMARS_BUSY
from specdec.serve.http.bodies import parse
from specdec.serve.http.errors import ApiError, as_json
from specdec.serve.http.fields import CHAT, COMPLETION

Json = dict[str, object]

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
    """Holds a line of the input. custom_id: None if it has none that can be read.

    problem: why it cannot be asked; url and body are empty then.
    """

    custom_id: str | None
    url: str = ""
    body: bytes = b""
    problem: str | None = None
    code: str = "invalid_line"


@dataclass(frozen=True, slots=True)
class Answered:
    """Holds a line of the output, and what there is to count of it."""

    line: bytes
    is_error: bool
    num_tokens: int


def read_line(data: bytes) -> BatchLine:
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
    response = await _post(app, line)
    while response["status_code"] == UNAVAILABLE:
        error = _part(response["body"], "error")
        if error["code"] != GRAMMARS_BUSY:
            raise BatchStopped(str(error["message"]))
        await asyncio.sleep(BUSY_SECONDS)
        response = await _post(app, line)
    is_error = response["status_code"] != 200
    num_tokens = 0 if is_error else _part(response["body"], "usage")["completion_tokens"]
    assert isinstance(num_tokens, int), num_tokens
    return Answered(_answer(line, response=response), is_error, num_tokens)


def answer_problem(line: BatchLine) -> Answered:
    """Write the answer to a line that cannot be asked."""
    error: Json = {"code": line.code, "message": line.problem}
    return Answered(_answer(line, error=error), True, 0)


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


def _answer(line: BatchLine, response: Json | None = None, error: Json | None = None) -> bytes:
    name = f"batch_req_{uuid.uuid4().hex}"
    found = {"id": name, "custom_id": line.custom_id, "response": response, "error": error}
    return as_json(found)


def _part(body: object, name: str) -> Json:
    assert isinstance(body, dict), body
    return dict(body[name])


async def _post(app: ASGIApp, line: BatchLine) -> Json:
    """Return the status, request id and JSON of an answer."""
    unread = [line.body]
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
        "path": line.url,
        "raw_path": line.url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": HEADERS,
    }
    await app(scope, receive, send)
    start, *parts = messages
    return {
        "status_code": start["status"],
        "request_id": dict(start["headers"])[b"x-request-id"].decode(),
        "body": json.loads(b"".join(part.get("body", b"") for part in parts)),
    }
