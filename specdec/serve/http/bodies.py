"""A request's body: JSON in UTF-8, bounded in bytes, values, depth and time.

A large one is read in a thread, one at a time, so that the event loop goes on meanwhile.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from specdec.requests import bounded_json
from specdec.serve.http.errors import ApiError
from specdec.serve.http.options import BODY_SECONDS, MAX_BODY_BYTES

Container = dict[str, object] | list[object]
Body = dict[str, object]
Result = TypeVar("Result")

MAX_DEPTH = 64  # of lists and objects
MAX_KEYS = 1 << 13  # of one object
MAX_VALUES = 1 << 17  # beside token ids: everything that reads a body walks over them
# what is read of a body that is too large, so that its sender gets to read the answer
MOST_DROPPED = 8 * MAX_BODY_BYTES
LARGE = 1 << 16  # bytes; a smaller body takes at most some milliseconds
TOKEN_IDS = ("prompt", "tokens")  # fields that may have more than MAX_VALUES


class Bodies:
    """Reads bodies, one large one at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def read(self, request: Request, meaning: Callable[[Body], Result]) -> Result:
        """Return what the JSON object of a request means; ApiError if it is none."""
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
    """Read a value in JSON; ApiError for what is none, for too many values and deep nesting."""
    try:
        body = bounded_json.loads(data)
    except bounded_json.JsonSizeError as error:
        raise ApiError(400, f"the body has {error}") from error
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON in UTF-8: {error}") from error
    for depth, level in enumerate(_levels(body)):
        if depth == MAX_DEPTH:
            raise ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep")
        if any(isinstance(each, dict) and len(each) > MAX_KEYS for each in level):
            raise ApiError(400, f"an object in the body has more than {MAX_KEYS} keys")
    return body


def _levels(body: object) -> Iterator[list[Container]]:
    """Yield the lists and objects of each level: other code may recurse, once it is not deep."""
    level = _containers([body])
    while level:
        yield level
        level = _containers(
            item for each in level for item in (each.values() if isinstance(each, dict) else each)
        )


def _containers(items: Iterable[object]) -> list[Container]:
    return [item for item in items if isinstance(item, dict | list)]
