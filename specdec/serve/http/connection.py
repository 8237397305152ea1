"""A client's connection: bounds on what is sent beside bodies, and on how long one is waited for.

uvicorn's protocol over httptools bounds none of it. This one is named to uvicorn, which would take
another, with other bounds, where httptools is missing. A connection that goes too far gets an error
and is closed; requests that it sent before are answered first.
"""

import asyncio
from enum import Enum
from typing import NoReturn

from starlette.datastructures import Headers
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from specdec.serve.http.errors import ApiError
from specdec.serve.http.gate import SECURITY_HEADERS, unread_coding
from specdec.serve.http.options import BODY_SECONDS
from specdec.serve.http.unchunked import without_chunks

MAX_URL_BYTES = 8 << 10
MAX_HEAD_BYTES = 32 << 10  # the URL, the headers and the trailers of a request together
MAX_HEADERS = 100  # with the trailers
MAX_PIPELINED = 16  # requests that wait on a connection for the answer to another
PIECE_BYTES = 16 << 10  # that are parsed before they are counted
HEAD_SECONDS = 20.0  # to receive a head in, from its first byte
STALLED_SECONDS = 60.0  # without reading after which a client is left
LINGER_SECONDS = 1.0  # to read an error in: a close with unread bytes could take it away
MAX_LINGERING = 64  # connections beyond the most that are told so


class Wait(Enum):
    """What only the client can bring about."""

    REQUEST = "a request"
    HEAD = "the rest of a head"
    BODY = "the rest of a body that was answered early"


class Connection(HttpToolsProtocol):
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
        self._error: ApiError | None = None  # of a callback, which the parser tells as its own
        self._has_refused = False  # and drops what is sent
        self._wait: Wait | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse it if there are too many."""
        super().connection_made(transport)
        extra = 0 if self._most is None else len(self.connections) - self._most
        if extra > MAX_LINGERING:
            transport.abort()
        elif extra > 0:
            self._refuse(ApiError(503, f"too many connections: at most {self._most} are served"))
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """End its timers."""
        super().connection_lost(exc)
        self._set_wait(None)
        self._end_stall()

    def data_received(self, data: bytes) -> None:
        """Parse and count."""
        for start in range(0, len(data), PIECE_BYTES):
            if self._has_refused:
                return
            piece = data[start : start + PIECE_BYTES]
            self._has_begun |= self._is_in_head
            self._num_unused += len(piece)
            super().data_received(piece)
            # what the parser holds back, a value without an end, say, reaches no callback
            if self._num_unused > MAX_HEAD_BYTES + PIECE_BYTES and not self._has_refused:
                self._refuse(_too_large() if self._is_in_head else _bad_framing())
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser refuses."""
        self._refuse(self._error or ApiError(400, "this is no valid request of HTTP"))

    def on_message_begin(self) -> None:
        """Count anew."""
        super().on_message_begin()
        self._has_begun = True
        self._num_headers = 0
        self._num_header_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A part of it."""
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._fail(ApiError(414, f"the URL is too long: at most {MAX_URL_BYTES} bytes"))
        self._num_header_bytes = len(self.url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; drop a trailer, which nothing here reads."""
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or self._num_header_bytes > MAX_HEAD_BYTES:
            self._fail(_too_large())
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(ApiError(429, f"more than {MAX_PIPELINED} requests wait on a connection"))
        # the parser refuses some codings without naming them
        unread = unread_coding(Headers(raw=self.headers), "Transfer-Encoding")
        if unread is not None:
            self._fail(ApiError(415, unread))
        super().on_headers_complete()
        self._is_in_head = self._has_begun = False
        self._num_unused = 0
        self._set_wait(None)

    def on_body(self, body: bytes) -> None:
        """A part of it."""
        self._num_unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for the next head."""
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
            self._begin_stall()
        self._watch()

    def pause_writing(self) -> None:
        """See whether the client reads at all."""
        super().pause_writing()
        self._begin_stall()

    def resume_writing(self) -> None:
        """It does."""
        super().resume_writing()
        self._end_stall()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] < "1.1":
            app = without_chunks(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _fail(self, error: ApiError) -> NoReturn:
        """End parsing; the parser's error ends in `send_400_response`."""
        self._error = error
        raise error

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
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + bytes(answer.body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _watch(self) -> None:
        """Set a deadline for what the client should do next; one that is set runs on."""
        if self._has_refused or self.transport.is_closing():
            return
        if self._has_begun:
            self._set_wait(Wait.HEAD)
        elif self._is_answering():
            self._set_wait(None)
        else:
            self._set_wait(Wait.REQUEST if self._is_in_head else Wait.BODY)

    def _set_wait(self, wait: Wait | None) -> None:
        if wait is self._wait and wait is not None:
            return
        self._wait = wait
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if wait is not None:
            self._deadline = self.loop.call_later(self._seconds(wait), self._expire)

    def _seconds(self, wait: Wait) -> float:
        if wait is Wait.REQUEST:
            return self.timeout_keep_alive
        return HEAD_SECONDS if wait is Wait.HEAD else BODY_SECONDS

    def _expire(self) -> None:
        if self._wait is Wait.HEAD:
            late = f"the head of the request was not received within {HEAD_SECONDS:g} s"
            self._refuse(ApiError(408, late))
        else:
            self.transport.abort()

    def _begin_stall(self) -> None:
        self._end_stall()
        size = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(STALLED_SECONDS, self._check_stall, size)

    def _check_stall(self, size: int) -> None:
        """size: of the buffer when the timer began."""
        if self.transport.get_write_buffer_size() >= size:
            self.transport.abort()
        else:
            self._begin_stall()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def _too_large() -> ApiError:
    most = f"{MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
    return ApiError(431, f"the head of the request is too large: at most {most}")


def _bad_framing() -> ApiError:
    most = f"at most {MAX_HEAD_BYTES} bytes"
    return ApiError(400, f"too much between the chunks of the body or after it: {most}")
