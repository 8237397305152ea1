"""What a connection may send before any key is asked for, and how long it may take."""

import json
import resource
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from specdec.serve.http.server import raise_file_limit
from tests.specdec.serve.http.raw import BODY, PART, POST, answer_to, connected, received, status
from tests.specdec.serve.http.test_process import Process

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LETTERS = b"x" * PART
FIELDS = b"a:b\r\n" * (PART // 5)
# how a request begins, what follows it without end, MB of it in the slow test, and the answer
FLOODS = {
    "short headers": (GET, FIELDS, 23, 431),
    "one value": (GET + b"a: ", LETTERS, 42, 431),
    "one name": (GET, LETTERS, 20, 431),
    "blanks before a value": (GET + b"a:", b" " * PART, 20, 431),
    "the URL": (b"GET /", LETTERS, 56, 414),
    "the query": (b"GET /health?", LETTERS, 20, 414),
    "the method": (b"", LETTERS, 1, 400),
    "empty lines": (b"", b"\r\n" * (PART // 2), 20, 431),
    "trailers": (CHUNKED + b"0\r\n", FIELDS, 59, 431),
    "one trailer": (CHUNKED + b"0\r\na: ", LETTERS, 42, 400),
    "the size of a chunk": (CHUNKED, b"0" * PART, 20, 400),
    "a chunk's extension": (CHUNKED + b"1;a", LETTERS, 20, 400),
}
MODULE = "specdec.serve.http.connection"


def sent(client, part, size):
    """Bytes of a flood that the server takes."""
    for count in range(0, size, len(part)):
        try:
            client.sendall(part)
        except OSError:
            return count
    return size


@pytest.mark.parametrize("name", FLOODS)
def test_what_never_ends_is_refused_and_the_connection_closed(live, name):
    start, part, _, expected = FLOODS[name]
    with connected(live.url) as client:
        client.sendall(start)
        sent(client, part, 4 * PART)
        answer = received(client)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status(answer) == expected
    assert b"connection: close" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    live.until_idle()


@pytest.mark.parametrize("size", [1, 7])
def test_a_head_in_small_pieces_is_bounded_like_another(live, size):
    with connected(live.url) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = GET + b"a: b\r\n" * 101
        for start in range(0, len(data), size):
            client.sendall(data[start : start + size])
        assert status(received(client)) == 431


@pytest.mark.parametrize("num_bytes, expected", [(30_000, 200), (33_000, 431)])
@pytest.mark.parametrize("num_headers", [1, 98])
def test_a_head_is_bounded_in_bytes(live, num_bytes, num_headers, expected):
    value = b"y" * (num_bytes // num_headers)
    fields = b"".join(b"x%d: %s\r\n" % (i, value) for i in range(num_headers))
    answer = answer_to(live.url, GET + fields + b"Connection: close\r\n\r\n")
    assert status(answer) == expected


@pytest.mark.parametrize("num_headers, expected", [(98, 200), (99, 431)])
def test_a_head_is_bounded_in_headers(live, num_headers, expected):
    answer = answer_to(live.url, GET + b"a: b\r\n" * num_headers + b"Connection: close\r\n\r\n")
    assert status(answer) == expected


@pytest.mark.parametrize("num_bytes, expected", [(8192, 200), (8193, 414)])
def test_a_url_is_bounded(live, num_bytes, expected):
    url = b"/health?".ljust(num_bytes, b"q")
    rest = GET.removeprefix(b"GET /health") + b"Connection: close\r\n\r\n"
    assert status(answer_to(live.url, b"GET " + url + rest)) == expected


def test_trailers_are_read_and_dropped(live):
    with connected(live.url) as client:
        chunk = b"%x\r\n%s\r\n0\r\nx-request-id: other\r\n\r\n" % (len(BODY), BODY)
        client.sendall(CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + chunk)
        answer = received(client)
    assert status(answer) == 200
    assert b"other" not in answer


def test_a_request_before_a_refused_one_is_answered(live):
    body = BODY.replace(b"2,", b"40,")
    first = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    answer = answer_to(live.url, first + GET + b"a: b\r\n" * 101 + b"\r\n")
    assert status(answer) == 200
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"}")


def test_few_requests_wait_on_a_connection(live):
    body = BODY.replace(b"2,", b"40,")
    first = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    answer = answer_to(live.url, first + (GET + b"\r\n") * 1000)
    assert answer.count(b"HTTP/1.1 200") == 1 + 16


@pytest.mark.parametrize("begun", [b"\r\n", b"GE", GET, GET + b"\r\n" + GET])
def test_half_a_head_is_a_408(live, monkeypatch, begun):
    monkeypatch.setattr(f"{MODULE}.HEAD_SECONDS", 0.2)
    answer = answer_to(live.url, begun)
    assert answer.count(b"HTTP/1.1 408") == 1
    assert answer.count(b"HTTP/1.1 200") == begun.count(b"\r\n\r\n")


def test_a_head_byte_by_byte_has_no_more_time(live, monkeypatch):
    monkeypatch.setattr(f"{MODULE}.HEAD_SECONDS", 0.3)
    with connected(live.url) as client:
        with suppress(ConnectionError):
            for byte in GET:  # 2 s of it
                client.sendall(bytes([byte]))
                time.sleep(0.05)
        assert status(received(client)) == 408


def test_a_head_that_is_late_takes_no_answer_away(live, monkeypatch):
    monkeypatch.setattr(f"{MODULE}.HEAD_SECONDS", 0.05)
    body = BODY.replace(b"2,", b'120, "ignore_eos": true,')
    first = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    answer = answer_to(live.url, first + GET)
    assert answer.count(b"HTTP/1.1") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 120


@pytest.mark.parametrize("begun", [b"", GET + b"\r\n"])
def test_a_connection_that_sends_nothing_is_closed_in_silence(live, monkeypatch, begun):
    monkeypatch.setattr(live.server.config, "timeout_keep_alive", 0.2)
    answer = answer_to(live.url, begun)
    assert answer.count(b"HTTP/1.1") == (begun != b"")


def test_the_rest_of_a_body_that_was_answered_early_is_not_waited_for(live, monkeypatch):
    monkeypatch.setattr(f"{MODULE}.BODY_SECONDS", 0.3)
    with connected(live.url) as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        time.sleep(0.1)
        client.sendall(b"{")  # which ends no wait
        assert status(received(client)) == 415


def test_a_client_that_reads_nothing_is_left(live, monkeypatch):
    monkeypatch.setattr(f"{MODULE}.STALLED_SECONDS", 0.2)
    get = b"GET /page/style.css HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connections = live.server.server_state.connections
    before = set(connections)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        where = urlsplit(live.url)
        client.connect((where.hostname, where.port))
        client.settimeout(0.2)
        with suppress(TimeoutError, ConnectionError):
            while True:
                client.sendall(get)
        until(lambda: not set(connections) - before)


@pytest.mark.parametrize(
    "soft, hard, most",
    [
        (256, 1024, 1024),
        (1024, 1024, 1024),
        (256, resource.RLIM_INFINITY, 10_240),
        (20_000, resource.RLIM_INFINITY, 10_240),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 10_240),
    ],
)
def test_as_many_files_are_opened_as_the_system_allows(monkeypatch, soft, hard, most):
    chosen = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: chosen.append(limits))
    assert raise_file_limit() == most
    assert chosen == ([(most, hard)] if soft == 256 else [])


def until(is_so):
    """Wait."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_more_connections_than_the_most_are_told_so(live, monkeypatch):
    most = len(live.server.server_state.connections) + 2
    monkeypatch.setattr(live.server.config, "limit_concurrency", most)
    with connected(live.url) as one, connected(live.url) as two:
        two.sendall(GET + b"\r\n")
        assert status(two.recv(PART)) == 200
        with connected(live.url) as third:
            answer = received(third)
        assert status(answer) == 503
        assert b"retry-after: 1" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].endswith(
            f"at most {most} are served"
        )
        one.sendall(GET + b"\r\n")
        assert status(one.recv(PART)) == 200
    until(lambda: len(live.server.server_state.connections) < most)
    assert live.get("/health").status_code == 200


def test_a_draining_server_does_not_wait_for_half_a_head(serve):
    with ExitStack() as open_heads:
        with serve() as live:
            for begun in (b"", b"GE", GET, GET + b"a: b\r\n" * 101):
                open_heads.enter_context(connected(live.url)).sendall(begun)
            began = time.monotonic()
        assert time.monotonic() - began < 4  # uvicorn gives connections 5 s


class Watch:
    """The memory of a server, and how long it takes to answer /health, while a block runs."""

    def __init__(self, server):
        self._server = server
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.longest = 0.0

    def _run(self):
        while not self._is_over.wait(0.02):
            began = time.monotonic()
            assert httpx2.get(f"{self._server.url}/health", timeout=90).status_code == 200
            self.longest = max(self.longest, time.monotonic() - began)

    def __enter__(self):
        self.before = self._memory()
        self._cpu = self._seconds()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()
        self.after = self._memory()
        self.cpu = self._seconds() - self._cpu

    def _memory(self):
        """MiB."""
        status = Path(f"/proc/{self._server.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) >> 10

    def _seconds(self):
        """Of processor time."""
        fields = Path(f"/proc/{self._server.process.pid}/stat").read_text().rpartition(")")[2]
        return sum(map(int, fields.split()[11:13])) / 100

    def shown(self):
        """In a line."""
        memory = f"{self.before} -> {self.after} MiB"
        return f"{memory}, /health {self.longest:.2f} s, processor {self.cpu:.2f} s"


@contextmanager
def process(*options):
    """A server of its own, with a key that nothing here sends."""
    sizes = ("--max-model-len", "128", "--max-num-seqs", "2", "--api-key", "k")
    server = Process("specdec serve demo", *sizes, *options)
    try:
        assert httpx2.get(f"{server.url}/health").status_code == 200
        yield server
    finally:
        server.process.terminate()
        server.end()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FLOODS if name != "the method"])
def test_a_flood_takes_neither_memory_nor_time(name):
    start, part, size, _ = FLOODS[name]
    with process() as server, connected(server.url) as client, Watch(server) as watch:
        client.sendall(start)
        count = sent(client, part, size << 20)
        time.sleep(0.5)
    print(f"\n{name}: {count / 1e6:.0f} MB taken, {watch.shown()}")
    assert watch.after - watch.before < 32
    assert watch.longest < 2


@pytest.mark.slow
def test_many_requests_at_once_on_a_connection_take_no_memory():
    with process() as server, connected(server.url) as client, Watch(server) as watch:
        client.settimeout(2)
        count = sent(client, b"GET /v1/models HTTP/1.1\r\n\r\n" * 2048, 20 << 20)
    print(f"\npipelined: {count / 1e6:.0f} MB taken, {watch.shown()}")
    assert watch.after - watch.before < 32
    assert watch.longest < 2


@contextmanager
def few_files(count):
    """What starts here may open so many files, or more if it asks for them."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_half_heads_hold_a_server_for_a_while_only(host):
    with few_files(256) as most:
        server = Process("specdec serve demo", "--host", host, "--max-waiting", "0")
    head = GET + b"a: " + b"x" * 30_000
    try:
        with ExitStack() as heads, Watch(server) as watch:
            for _ in range(300):
                heads.enter_context(connected(server.url)).sendall(head)
            time.sleep(25)
            count = num_files(server)
        print(f"\n300 half heads: {count} files after 25 s, {watch.shown()}")
        assert limit_of_files(server) == most
        assert watch.longest < 2
        assert watch.after - watch.before < 64
        assert count < 100
    finally:
        server.process.terminate()
        server.end()


@pytest.mark.slow
def test_connections_are_bounded():
    server = Process("specdec serve demo", "--max-waiting", "0", "--max-num-seqs", "2")
    try:
        with ExitStack() as clients:
            with Watch(server) as watch:
                for _ in range(1900):
                    head = GET + b"a: " + b"x" * 30_000
                    clients.enter_context(connected(server.url)).sendall(head)
            others = [clients.enter_context(connected(server.url)) for _ in range(400)]
            time.sleep(2)
            count = num_files(server)
            told = [received(each) for each in others[-20:]]
        print(f"\n2,300 connections: {count} files, {watch.shown()}")
        assert watch.longest < 2
        assert watch.after - watch.before < 128
        assert count < 2200
        assert all(each == b"" or status(each) == 503 for each in told)
    finally:
        server.process.terminate()
        server.end()


def num_files(server):
    """That a process has open."""
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def limit_of_files(server):
    """The soft one of a process."""
    text = Path(f"/proc/{server.process.pid}/limits").read_text()
    return int(text.partition("Max open files")[2].split()[0])
