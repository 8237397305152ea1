"""Requests byte by byte, as no client library sends them."""

import socket
from contextlib import suppress
from urllib.parse import urlsplit

PART = 1 << 16
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "def f(", "max_tokens": 2, "temperature": 0}'


def connected(url):
    """A socket to a server."""
    where = urlsplit(url)
    return socket.create_connection((where.hostname, where.port), timeout=90)


def received(client):
    """All until the server closes."""
    found = b""
    with suppress(ConnectionResetError):
        while part := client.recv(PART):
            found += part
    return found


def answer_to(url, data):
    """What a request is answered until the server closes."""
    with connected(url) as client:
        client.sendall(data)
        return received(client)


def status(answer):
    """Of a raw answer."""
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    return int(answer[9:12])
