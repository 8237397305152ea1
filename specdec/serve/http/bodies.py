"""A request's body: JSON in UTF-8, bounded in bytes, depth and time."""

import asyncio
import json

from starlette.requests import ClientDisconnect, Request

from specdec.serve.http.errors import ApiError
from specdec.serve.http.options import BODY_SECONDS, MAX_BODY_BYTES, MAX_DEPTH

Container = dict[str, object] | list[object]

# what is read of a body that is too large, so that its sender gets to read the answer
MOST_DROPPED = 8 * MAX_BODY_BYTES


async def read_body(request: Request) -> dict[str, object]:
    """The JSON object of a request; ApiError if it is none."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await _read(request)
    except TimeoutError:
        raise ApiError(408, f"the body was not received within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended early") from None
    body = parse(data)
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    return body


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
    """A value in JSON; ApiError for what is none, for NaN, and for too deep a nesting."""
    try:
        body = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON in UTF-8: {error}") from error
    _check_depth(body)
    return body


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no number in JSON")


def _check_depth(body: object) -> None:
    """Level by level: what is too deep for Python's recursion must not reach other code."""
    level = _containers([body])
    for _ in range(MAX_DEPTH):
        level = [inner for value in level for inner in _containers(value)]
    if level:
        raise ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep")


def _containers(value: Container) -> list[Container]:
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, dict | list)]
