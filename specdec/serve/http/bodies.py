"""A request's body: JSON in UTF-8, bounded in bytes, values, depth and time.

A large one is read in a thread, one at a time, so that the event loop goes on meanwhile.
"""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from specdec.requests import bounded_json
from specdec.serve.http.errors import ApiError
from specdec.serve.http.options import (
    BODY_SECONDS,
    MAX_BODY_BYTES,
    MAX_DEPTH,
    MAX_KEYS,
    MAX_VALUES,
)

Container = dict[str, object] | list[object]
Body = dict[str, object]
Result = TypeVar("Result")

# what is read of a body that is too large, so that its sender gets to read the answer
MOST_DROPPED = 8 * MAX_BODY_BYTES
LARGE = 1 << 16  # bytes; a smaller body takes at most some milliseconds
TOKEN_IDS = ("prompt", "tokens")  # fields that may have more than MAX_VALUES


class Bodies:
    """Reads the bodies of requests. Only one large body is parsed at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def read(self, request: Request, meaning: Callable[[Body], Result]) -> Result:
        """What the JSON object of a request means; ApiError if it is none."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                data = await _read(request)
        except TimeoutError:
            raise ApiError(408, f"the body was not received within {BODY_SECONDS:g} s") from None
        except ClientDisconnect:
            raise ApiError(400, "the body ended early") from None
        understand = partial(_understood, data, meaning)
        if len(data) <= LARGE:
            return understand()
        async with self._lock:
            return await asyncio.to_thread(understand)


def _understood(data: bytes, meaning: Callable[[Body], Result]) -> Result:
    body = parse(data)
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    others = {name: value for name, value in body.items() if name not in TOKEN_IDS}
    if sum(len(each) for level in _levels(others) for each in level) > MAX_VALUES:
        limit = f"at most {MAX_VALUES} are allowed beside token ids"
        raise ApiError(400, f"the body has too many values: {limit}")
    return meaning(body)


async def _read(request: Request) -> bytes:
    parts = bytearray()
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= MAX_BODY_BYTES:
            parts += part
        elif num_bytes > MOST_DROPPED:
            break
    if num_bytes > MAX_BODY_BYTES:
        limit = f"at most {MAX_BODY_BYTES >> 20} MiB are allowed"
        raise ApiError(413, f"the body is too large: {limit}", code="request_too_large")
    return bytes(parts)


def parse(data: bytes) -> object:
    """A value in JSON; ApiError for what is none, for too many values and for deep nesting."""
    try:
        body = bounded_json.loads(data)
    except bounded_json.JsonSizeError as error:
        raise ApiError(400, f"the body has {error}") from error
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON in UTF-8: {error}") from error
    _check_shape(body)
    return body


def _check_shape(body: object) -> None:
    """Level by level: what is too deep for Python's recursion must not reach other code."""
    for depth, level in enumerate(_levels(body)):
        if depth == MAX_DEPTH:
            raise ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep")
        if any(isinstance(each, dict) and len(each) > MAX_KEYS for each in level):
            raise ApiError(400, f"an object in the body has more than {MAX_KEYS} keys")


def _levels(body: object) -> Iterator[list[Container]]:
    """The lists and objects of each level, the outermost first."""
    level = _containers([body])
    while level:
        yield level
        level = [inner for value in level for inner in _containers(value)]


def _containers(value: Container) -> list[Container]:
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, dict | list)]
