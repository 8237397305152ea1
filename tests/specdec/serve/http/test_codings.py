"""Codings of bodies and of transfers: which are read, and what HTTP/1.0 is sent."""

import gzip
import json

import pytest

from tests.specdec.serve.http.raw import BODY, POST, answer_to, status

STREAMS = {
    "/v1/completions": {"prompt": "def f(", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "def f("}], "max_tokens": 3},
    "/v1/responses": {"input": "def f(", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "def f("}], "max_tokens": 3},
}


def posted(live, path, body, version, *headers):
    """A request; its head and its body."""
    lines = [f"POST {path} HTTP/{version}", f"Content-Length: {len(body)}", *headers]
    lines += ["Host: localhost", "Content-Type: application/json"]
    answer = answer_to(live.url, "\r\n".join([*lines, "\r\n"]).encode() + body)
    head, _, found = answer.partition(b"\r\n\r\n")
    return head.lower(), found


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",)])
def test_a_stream_to_http_1_0_has_no_chunks(live, path, headers):
    body = json.dumps({**STREAMS[path], "stream": True}).encode()
    head, events = posted(live, path, body, "1.0", *headers)
    assert head.startswith(b"http/1.1 200")
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert b"connection: close" in head
    lines = events.decode().splitlines()
    assert len(events) > 300
    assert all(line.startswith(("data: ", "event: ")) or not line for line in lines)


def test_a_stream_to_http_1_1_is_chunked(live):
    body = json.dumps({**STREAMS["/v1/completions"], "stream": True}).encode()
    head, events = posted(live, "/v1/completions", body, "1.1", "Connection: close")
    assert b"transfer-encoding: chunked" in head
    assert events.endswith(b"0\r\n\r\n")


def test_an_answer_of_known_length_to_http_1_0_names_it(live):
    head, body = posted(live, "/v1/completions", BODY, "1.0")
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["choices"]


@pytest.mark.parametrize(
    "path", [*STREAMS, "/tokenize", "/detokenize", "/v1/messages/count_tokens"]
)
@pytest.mark.parametrize("coding", ["gzip", "br", "identity, zstd", "aws-chunked"])
def test_a_body_in_a_coding_is_a_415_that_names_it(live, path, coding):
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    found = live.post(path, content=gzip.compress(BODY), headers=headers)
    assert found.status_code == 415
    assert found.json()["error"]["message"].startswith(f"Content-Encoding: '{coding}' is not read")


def test_codings_that_change_nothing_are_taken(live):
    for given in ("identity", "Identity", ""):
        headers = {"Content-Type": "application/json", "Content-Encoding": given}
        assert live.post("/v1/completions", content=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize("coding", ["gzip", "gzip, chunked", "identity"])
def test_another_coding_of_the_transfer_is_a_415_that_names_it(live, coding):
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    head = POST + f"Transfer-Encoding: {coding}\r\nConnection: close\r\n\r\n".encode()
    answer = answer_to(live.url, head + chunk)
    assert status(answer) == 415
    assert f"Transfer-Encoding: '{coding}' is not read".encode() in answer
    assert status(answer_to(live.url, head.replace(coding.encode(), b"Chunked") + chunk)) == 200
