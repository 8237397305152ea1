"""What load balancers and other checkers of health ask by habit."""

import pytest

from tests.specdec.serve.http.raw import answer_to, status

CLOSE = "Connection: close\r\n"
CHECKS = {
    "HAProxy": "OPTIONS {} HTTP/1.0\r\n",
    "keepalived": "GET {} HTTP/1.0\r\n",
    "nginx's upstream check": "HEAD {} HTTP/1.0\r\n",
    "Apache": "HEAD {} HTTP/1.0\r\nHost: localhost:8000\r\n",
    "Kubernetes": f"GET {{}} HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept: */*\r\n{CLOSE}",
    "curl -I": f"HEAD {{}} HTTP/1.1\r\nHost: localhost\r\n{CLOSE}",
    "curl -X OPTIONS": f"OPTIONS {{}} HTTP/1.1\r\nHost: localhost\r\n{CLOSE}",
    "an absolute URL": f"GET http://localhost{{}} HTTP/1.1\r\nHost: localhost\r\n{CLOSE}",
    "an empty body": f"GET {{}} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n{CLOSE}",
}
HEALTH = ["/health", "/ping"]


def asked(live, check, path):
    """The status, the head and the body that a check is answered with."""
    answer = answer_to(live.url, f"{check.format(path)}\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    return status(answer), head.lower(), body


def get_paths(live):
    """Of every route of GET."""
    routes = live.server.application.app.routes
    paths = [each.path for each in routes if "GET" in getattr(each, "methods", [])]
    return [path.replace("{name:path}", "demo") for path in paths]


@pytest.mark.parametrize("name", CHECKS)
def test_checks_of_load_balancers_work_on_every_get_route(live, name):
    paths = get_paths(live)
    assert {"/", "/page/main.js", "/health", "/version", "/metrics", "/v1/models"} < set(paths)
    for path in paths:
        found, head, body = asked(live, CHECKS[name], path)
        assert found == 200, path
        assert (body == b"") == (not CHECKS[name].startswith("GET") or path in HEALTH)
        if CHECKS[name].startswith("OPTIONS") and path not in HEALTH:
            assert b"allow: get, head, options" in head


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("host", ["", "Host: \r\n", "Host: cluster_1\r\n", "Host: 10.1.2.3:80\r\n"])
def test_health_is_told_whatever_the_host(live, method, host):
    for path in HEALTH:
        check = f"{method} {{}} HTTP/1.1\r\n{host}{CLOSE}"
        assert asked(live, check, path)[0] == 200


def test_ping_takes_a_post_without_a_body(live):
    assert asked(live, "POST {} HTTP/1.0\r\n", "/ping")[0] == 200


@pytest.mark.parametrize("host", ["", "Host: \r\n", "Host: evil.example\r\n"])
def test_another_route_needs_the_servers_own_name(live, host):
    assert asked(live, f"GET {{}} HTTP/1.1\r\n{host}{CLOSE}", "/version")[0] == 400
    if host:
        assert asked(live, f"GET {{}} HTTP/1.0\r\n{host}", "/version")[0] == 400


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", [*HEALTH, "*"])
def test_a_check_sees_that_the_server_shuts_down(live, monkeypatch, path, version):
    for method in ("OPTIONS",) if path == "*" else ("GET", "HEAD", "OPTIONS"):
        check = f"{method} {{}} HTTP/{version}\r\n{CLOSE}"
        assert asked(live, check, path)[0] == 200
        with monkeypatch.context() as patch:
            patch.setattr(live.server.application.traffic, "is_draining", True)
            assert asked(live, check, path)[0] == 503


def test_a_check_gets_no_further_than_the_key(serve):
    with serve(api_key="k") as locked:
        for path in get_paths(locked):
            is_open = path in HEALTH or path == "/" or path.startswith("/page/")
            for check in CHECKS.values():
                assert asked(locked, check, path)[0] == (200 if is_open else 401)


@pytest.mark.parametrize(
    "path, allowed",
    [
        ("/health", "GET, HEAD, OPTIONS"),
        ("/ping", "GET, HEAD, OPTIONS, POST"),
        ("/v1/models/demo", "GET, HEAD, OPTIONS"),
        ("/page/main.js", "GET, HEAD, OPTIONS"),
        ("/v1/completions", "POST"),
    ],
)
def test_another_method_is_a_405_that_names_those_allowed(live, path, allowed):
    found, head, body = asked(live, "DELETE {} HTTP/1.0\r\n", path)
    assert found == 405
    assert f"allow: {allowed.lower()}\r\n".encode() in head
    assert f"Method Not Allowed: DELETE {path}".encode() in body
