"""Answers to HTTP/1.0, which knows no chunks: the end of the connection ends one of no length.

uvicorn cuts an answer without a Content-Length into chunks, whatever the version of its request.
"""

from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Tell uvicorn that it sends a known length: that of each part, when the part is sent."""

    async def run(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        has_length = True

        async def send_plainly(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(
                    name.lower() == b"content-length" for name, _ in message.get("headers", [])
                )
                cycle.chunked_encoding = None if has_length else False
            elif message["type"] == "http.response.body" and not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return run
