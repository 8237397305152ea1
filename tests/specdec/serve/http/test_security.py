"""Who may call, and what no request may do. A test for each rule."""

import socket

import httpx2
import pytest

KEY = "sk-one"
BODY = {"prompt": "def f(", "max_tokens": 1}
CLOSED = [
    "/docs",
    "/openapi.json",
    "/v1/models",
    "/v1/models/demo",
    "/metrics",
    "/version",
    "/nowhere",
]
OPEN = ["/health", "/ping"]


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n"
)


def connected(live):
    """A socket to the server."""
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


@pytest.fixture(scope="module")
def locked(serve):
    """A server with a key, and a page of another origin that may call it."""
    with serve(api_key=KEY, allowed_origins=("https://a.example",)) as found:
        yield found


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer sk-two"}, {"x-api-key": "s"}, {"Authorization": f"Basic {KEY}"}],
)
def test_with_a_key_nothing_is_told_without_it(locked, path, headers):
    found = locked.get(path, headers=headers)
    assert found.status_code == 401
    assert found.json()["error"]["code"] == "invalid_api_key"


AGENTS = ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", *AGENTS]
)
def test_with_a_key_nothing_is_done_without_it(locked, path):
    assert locked.post(path, BODY).status_code == 401


@pytest.mark.parametrize("headers", [{"Authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}])
def test_the_key_opens_the_routes_of_agents(locked, headers):
    body = {"input": "def", "max_output_tokens": 1}
    assert locked.post("/v1/responses", body, headers=headers).status_code == 200
    body = {"messages": [{"role": "user", "content": "def"}], "max_tokens": 1}
    assert locked.post("/v1/messages", body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers, status, kind",
    [
        ({}, 401, "authentication_error"),
        ({"x-api-key": KEY, "Host": "evil.example"}, 400, "invalid_request_error"),
        ({"x-api-key": KEY, "Content-Type": "text/plain"}, 415, "invalid_request_error"),
    ],
)
def test_messages_are_refused_in_their_own_form(locked, headers, status, kind):
    found = locked.post("/v1/messages", {}, headers=headers)
    error = found.json()
    assert (found.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)


@pytest.mark.parametrize("path", OPEN)
def test_health_needs_no_key(locked, path):
    assert locked.get(path).status_code == 200


@pytest.mark.parametrize("headers", [{"Authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}])
def test_the_key_opens(locked, headers):
    assert locked.post("/v1/completions", BODY, headers=headers).status_code == 200
    assert locked.get("/metrics", headers=headers).status_code == 200


def test_a_key_of_other_bytes_is_a_401(locked):
    found = locked.get("/metrics", headers={"x-api-key": b"\xff\xfe"})
    assert found.status_code == 401


@pytest.mark.parametrize(
    "host, is_served",
    [
        ("localhost", True),
        ("LOCALHOST:99", True),
        ("127.0.0.1:8000", True),
        ("[::1]:80", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("10.1.2.3", False),
        ("", False),
    ],
)
def test_a_name_that_is_not_the_servers_own_is_refused(live, host, is_served):
    found = live.get("/version", headers={"Host": host})
    assert found.status_code == (200 if is_served else 400)


def test_other_names_are_served_where_the_operator_says_so(serve):
    with serve(host="0.0.0.0", allowed_hosts=("llm.example",)) as open_server:
        assert open_server.get("/version", headers={"Host": "LLM.example:1"}).status_code == 200
        assert open_server.get("/version", headers={"Host": "10.1.2.3:8"}).status_code == 200
        assert open_server.get("/version", headers={"Host": "evil.example"}).status_code == 400


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=application/json",
        "",
    ],
)
def test_only_json_is_taken(live, kind):
    found = live.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": kind})
    assert found.status_code == 415


def test_other_origins_may_not_call(live):
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    found = httpx2.options(live.url + "/v1/completions", headers=headers)
    assert "access-control-allow-origin" not in found.headers
    assert "access-control-allow-origin" not in live.get("/version", headers=headers).headers


def test_an_allowed_origin_may_call_and_no_other(locked):
    for origin, is_allowed in (("https://a.example", True), ("https://b.example", False)):
        headers = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "anthropic-version, authorization, x-stainless-os",
        }
        found = httpx2.options(locked.url + "/v1/completions", headers=headers)
        assert ("access-control-allow-origin" in found.headers) == is_allowed
        assert found.is_success == is_allowed


@pytest.mark.parametrize("path", ["/redoc", "/docs/oauth2-redirect"])
def test_no_other_page_describes_the_server(live, path):
    assert live.get(path).status_code == 404


def test_a_page_of_the_server_could_load_nothing_foreign(live):
    headers = live.get("/version").headers
    assert headers["content-security-policy"] == "default-src 'self'"
    assert headers["x-content-type-options"] == "nosniff"


def test_a_request_id_is_repeated_and_is_no_id_of_the_engine(live):
    for _ in range(2):  # an id of the engine could not be used twice
        found = live.post(
            "/v1/completions", {**BODY, "prompt": ["x", "y"]}, headers={"X-Request-Id": "a.b-c_1"}
        )
        assert found.headers["x-request-id"] == "a.b-c_1"
    assert live.get("/version").headers["x-request-id"]


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "a/b", "\xe9"])
def test_a_strange_request_id_is_refused(live, name):
    found = live.get("/version", headers={"X-Request-Id": name.encode("latin-1")})
    assert found.status_code == 400
    assert "x-request-id" not in found.headers


@pytest.mark.parametrize("field, value", [("priority", 1), ("chat_template", "{{ 1 }}")])
def test_what_must_be_enabled_is_refused(live, field, value):
    body = {"messages": [{"role": "user", "content": "x"}], field: value}
    found = live.post("/v1/chat/completions", body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, field)


def test_another_model_is_a_404(live):
    found = live.post("/v1/completions", {**BODY, "model": "gpt-4"})
    assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")
    assert live.get("/v1/models/gpt-4").status_code == 404
    assert live.get("/v1/models/demo").json()["max_model_len"] == 512


def test_where_too_many_wait_others_are_told_to_come_back(serve, prompts):
    with serve(max_waiting=0, sizes={"max_num_seqs": 1}) as busy:
        body = {"prompt": prompts[0], "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", busy.url + "/v1/completions", json=body) as running:
            lines = running.iter_lines()
            next(lines)
            found = busy.post("/v1/completions", BODY)
        assert (found.status_code, found.headers["retry-after"]) == (429, "1")
        busy.until_idle()
        assert busy.post("/v1/completions", BODY).status_code == 200


def test_a_body_that_never_ends_is_a_408(live, monkeypatch):
    monkeypatch.setattr("specdec.serve.http.bodies.BODY_SECONDS", 0.2)
    with connected(live) as client:
        client.sendall(HEAD + b"{")
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_client_that_leaves_within_its_body_leaves_nothing_behind(live):
    with connected(live) as client:
        client.sendall(HEAD + b"{")
    live.until_idle()


def test_an_error_of_the_server_tells_nothing_of_its_inside(live, monkeypatch):
    def fail(*_):
        raise RuntimeError("a secret")

    monkeypatch.setattr(live.server.application._prompts, "completion", fail)
    found = live.post("/v1/completions", BODY)
    assert (found.status_code, found.json()["error"]["type"]) == (500, "internal_server_error")
    assert "secret" not in found.text
    assert found.headers["connection"] == "close"
