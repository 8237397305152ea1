"""A client's connection: bounds on what is sent beside bodies, and on how long one is waited for.

uvicorn's protocol over httptools bounds none of it. This one is named to uvicorn, which would take
another, with other bounds, where httptools is missing. A connection that goes too far gets an error
and is closed; requests that it sent before are answered first.
"""

import asyncio
import math
import sys
from typing import Literal

from starlette.datastructures import Headers
from uvicorn import _types as asgi
from uvicorn.config import Config
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from specdec.serve.http.errors import ApiError
from specdec.serve.http.gate import SECURITY_HEADERS, check_coding
from specdec.serve.http.options import BODY_SECONDS

MAX_URL_BYTES = 8 << 10
MAX_HEAD_BYTES = 32 << 10  # the URL, the headers and the trailers of a request together
MAX_HEADERS = 100  # with the trailers
MAX_PIPELINED = 16  # requests that wait on a connection for the answer to another
PIECE_BYTES = 16 << 10  # that are parsed before they are counted
HEAD_SECONDS = 20.0  # to receive a head in, from its first byte
STALLED_SECONDS = 60.0  # without reading after which a client is left
LINGER_SECONDS = 1.0  # to read an error in: a close with unread bytes could take it away
MAX_LINGERING = 64  # connections beyond the most that are told so
BAD_FRAMING = f"too much between the chunks of the body or after it: at most {MAX_HEAD_BYTES} bytes"

# what only the client can bring about: a request, or the rest of a head or of an answered body
Wait = Literal["request", "head", "body"]


class Connection(httptools_impl.HttpToolsProtocol):
    """uvicorn creates one for each client. config.limit_concurrency: the most there may be."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._most = config.limit_concurrency
        self.limit_concurrency = None  # uvicorn's own check would refuse those that are here
        self._is_in_head = True  # or before it; otherwise within a body and its trailers
        self._has_begun = False  # a head
        self._num_headers = 0
        self._num_header_bytes = 0
        self._num_unused = 0  # bytes since the last one of a body
        self._has_refused = False  # and drops what is sent
        self._wait: Wait | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        extra = 0 if self._most is None else len(self.connections) - self._most
        if extra > MAX_LINGERING:
            transport.abort()
        elif extra > 0:
            self._refuse(ApiError(503, f"too many connections: at most {self._most} are served"))
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._set_wait(None)
        self._end_stall()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            if self._has_refused:
                return
            piece = data[start : start + PIECE_BYTES]
            self._has_begun |= self._is_in_head
            self._num_unused += len(piece)
            super().data_received(piece)
            # what the parser holds back, a value without an end, say, reaches no callback
            if self._num_unused > MAX_HEAD_BYTES + PIECE_BYTES and not self._has_refused:
                self._refuse(_too_large() if self._is_in_head else ApiError(400, BAD_FRAMING))
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser refuses, or what a callback does: its error is the context."""
        told = sys.exception()
        reason = None if told is None else told.__context__
        invalid = ApiError(400, "this is no valid request of HTTP")
        self._refuse(reason if isinstance(reason, ApiError) else invalid)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self._num_headers = 0
        self._num_header_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            raise ApiError(414, f"the URL is too long: at most {MAX_URL_BYTES} bytes")
        self._num_header_bytes = len(self.url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; drop a trailer, which nothing here reads."""
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or self._num_header_bytes > MAX_HEAD_BYTES:
            raise _too_large()
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ApiError(429, f"more than {MAX_PIPELINED} requests wait on a connection")
        # the parser refuses some codings without naming them
        check_coding(Headers(raw=self.headers), "Transfer-Encoding")
        super().on_headers_complete()
        self._is_in_head = self._has_begun = False
        self._num_unused = 0
        self._set_wait(None)

    def on_body(self, body: bytes) -> None:
        self._num_unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True
        self._num_unused = 0

    def on_response_complete(self) -> None:
        """Begin the next answer, or wait for a request."""
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last:
            self.cycle.body.clear()  # of a request that was refused unread
        if is_last and self._has_refused:
            self.transport.close()
        if self.transport.is_closing():  # which waits for its buffer to be read
            self._check_stall()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: asgi.ASGI3Application) -> None:
        if cycle.scope["http_version"] < "1.1":
            app = _without_chunks(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Send an error, if no answer is due before it, and close."""
        self._has_refused = True
        self._set_wait(None)
        is_within = self._is_answering() and not self._is_in_head  # a request's own body
        if is_within and self.pipeline:
            self.pipeline.popleft()
        elif is_within and not self.cycle.response_started:
            self.cycle.disconnected = True  # it can send no more
            self.cycle.message_event.set()
            self._send_last(error)
        elif not self._is_answering():
            self._send_last(error)

    def _send_last(self, error: ApiError) -> None:
        answer = error.response()
        headers = [
            *self.server_state.default_headers,
            *answer.raw_headers,
            *((name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()),
            (b"connection", b"close"),
        ]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(
            httptools_impl.STATUS_LINE[error.status] + lines + b"\r\n" + bytes(answer.body)
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _watch(self) -> None:
        """Set a deadline for what the client should do next; one that is set runs on."""
        if self._has_refused or self.transport.is_closing():
            return
        if self._has_begun:
            self._set_wait("head")
        elif self._is_answering():
            self._set_wait(None)
        else:
            self._set_wait("request" if self._is_in_head else "body")

    def _set_wait(self, wait: Wait | None) -> None:
        if wait == self._wait and wait is not None:
            return
        self._wait = wait
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if wait is not None:
            most = {"request": self.timeout_keep_alive, "head": HEAD_SECONDS, "body": BODY_SECONDS}
            self._deadline = self.loop.call_later(most[wait], self._expire)

    def _expire(self) -> None:
        if self._wait == "head":
            late = f"the head of the request was not received within {HEAD_SECONDS:g} s"
            self._refuse(ApiError(408, late))
        else:
            self.transport.abort()

    def _check_stall(self, before: float = math.inf) -> None:
        """Leave a client that has read nothing since the buffer had this size; else look again."""
        self._end_stall()
        size = self.transport.get_write_buffer_size()
        if size >= before:
            self.transport.abort()
        else:
            self._stall = self.loop.call_later(STALLED_SECONDS, self._check_stall, size)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def _too_large() -> ApiError:
    most = f"{MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
    return ApiError(431, f"the head of the request is too large: at most {most}")


def _without_chunks(
    cycle: RequestResponseCycle, app: asgi.ASGI3Application
) -> asgi.ASGI3Application:
    """Let the end of the connection end an answer of no length: HTTP/1.0 knows no chunks.

    uvicorn would cut it into chunks, so it is told a length: that of each part when it is sent.
    """

    async def run(
        scope: asgi.Scope, receive: asgi.ASGIReceiveCallable, send: asgi.ASGISendCallable
    ) -> None:
        async def send_plainly(message: asgi.ASGISendEvent) -> None:
            if message["type"] == "http.response.start":
                cycle.chunked_encoding = False
            elif message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return run
