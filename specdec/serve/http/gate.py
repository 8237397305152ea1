"""What every request passes: its Host, its key, its form, and whether the server still takes any.

A layer of ASGI around the application. It also gives every answer a request id. Generating requests
pass Traffic once more, which counts their samples.
"""

import asyncio
import hmac
import ipaddress
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serve.http.errors import SHUTTING_DOWN, ApiError
from specdec.serve.http.options import ServerOptions

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
WILDCARDS = {"0.0.0.0", "::"}
HEALTH_PATHS = {"/health", "/ping"}  # they tell nothing else, and change nothing
# static files of the page at `/`; a browser that loads a page sends no key
FOLDER = Path(__file__).parent / "page"
PAGE_PATHS = frozenset({"/", *(f"/page/{file.name}" for file in FOLDER.iterdir())})
OPEN_PATHS = PAGE_PATHS | HEALTH_PATHS  # no key needed
WATCHED_PATHS = {*HEALTH_PATHS, "/metrics"}  # answered while the server shuts down
CODINGS = {"Content-Encoding": "identity", "Transfer-Encoding": "chunked"}  # that are read
REQUEST_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Traffic:
    """Counts what is in flight, in one event loop. most: samples that may run or wait."""

    def __init__(self, most: int) -> None:
        self.is_draining = False
        self.num_requests = 0  # from the first byte of each to the last of its answer
        self._num_samples = 0
        self._most = most
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request; ApiError while the server is shutting down."""
        if self.is_draining:
            raise ApiError(503, SHUTTING_DOWN)
        self.num_requests += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self.num_requests -= 1
            if self.num_requests == 0:
                self._is_idle.set()

    @contextmanager
    def samples(self, count: int) -> Iterator[None]:
        """Count samples; ApiError if too many wait. Many are taken where one fits."""
        if self._num_samples >= self._most:
            waiting = f"{self._num_samples} samples are running or waiting"
            raise ApiError(429, f"{waiting}, at most {self._most} may: try again later")
        self._num_samples += count
        try:
            yield
        finally:
            self._num_samples -= count

    async def idle(self) -> None:
        await self._is_idle.wait()


class Gate:
    """Answers what may not pass itself."""

    def __init__(self, app: ASGIApp, options: ServerOptions, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic
        self._key = None if options.api_key is None else options.api_key.encode()
        self._hosts = LOOPBACK | {options.host.lower()} | set(map(str.lower, options.allowed_hosts))
        # a server on all addresses is reached by any of them; rebinding needs a name
        self._takes_addresses = options.host in WILDCARDS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] == "*" and scope["method"] == "OPTIONS":  # a question to the whole server
            scope = {**scope, "path": "/health", "raw_path": b"/health"}
        headers = Headers(scope=scope)
        name = headers.get("x-request-id", uuid.uuid4().hex)
        is_valid = REQUEST_ID.fullmatch(name) is not None

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                found.update(SECURITY_HEADERS)
                if is_valid:
                    found["X-Request-Id"] = name
            await send(message)

        try:
            if not is_valid:
                raise ApiError(400, "X-Request-Id: give 1 to 64 letters, digits, _, . or -")
            self._check(scope, headers)
            is_watched = scope["path"] in WATCHED_PATHS
            with nullcontext() if is_watched else self._traffic.request():
                await self._app(scope, receive, send_named)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send_named)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if scope["path"] in HEALTH_PATHS:  # load balancers send any Host, or none
            return
        # browsers send HTTP/1.1 and a Host, so that without it no page of another site calls
        if scope["http_version"] >= "1.1" or "host" in headers:
            self._check_host(headers.get("host", ""))
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            self._check_key(headers)
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(415, f"Content-Type: {kind!r:.100} given, send application/json")
            for name in CODINGS:
                check_coding(headers, name)

    def _check_host(self, given: str) -> None:
        """Refuse DNS rebinding: a page of another site that calls this server by its own name."""
        host = re.sub(r":\d+$", "", given).strip("[]").lower()
        if host in self._hosts or (self._takes_addresses and _is_address(host)):
            return
        advice = "start the server with --allowed-host to allow it"
        raise ApiError(400, f"Host: {given!r:.100} is not served here; {advice}")

    def _check_key(self, headers: Headers) -> None:
        assert self._key is not None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # in constant time, so that answers do not tell how much of a key is right
        if not hmac.compare_digest(given.encode(), self._key):
            wanted = "Authorization: Bearer KEY or x-api-key: KEY"
            raise ApiError(401, f"no valid API key: send {wanted}", code="invalid_api_key")


def check_coding(headers: Headers, name: str) -> None:
    """Raise ApiError if a header of this name says that the body has a coding that is not read."""
    given = ", ".join(headers.getlist(name))
    if given.strip().lower() not in ("", CODINGS[name]):
        raise ApiError(415, f"{name}: {given!r:.100} is not read here, send the body without it")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
