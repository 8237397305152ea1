"""What users of `serve` and `bench serve` get wrong, before anything is read."""

import socket
from importlib.util import find_spec

import pytest

import specdec.start.runners
from specdec.cli.errors import _without_keys
from specdec.serve.http.options import listen


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch):
    monkeypatch.setattr(
        specdec.start.runners, "load_target", lambda *_, **__: pytest.fail("weights read")
    )


@pytest.fixture
def without(monkeypatch):
    """without("starlette"): it is not installed."""

    def hide(module: str) -> None:
        monkeypatch.setattr(
            "specdec.cli.before_torch.find_spec",
            lambda name: None if name == module else find_spec(name),
        )

    return hide


@pytest.mark.parametrize("missing", ["starlette", "uvicorn", "httptools", "prometheus_client"])
def test_a_missing_extra_is_one_line(run, without, missing):
    without(missing)
    install = 'pip install "specdec[server]"'
    assert run("serve", "demo") == (2, "", f"specdec: error: serve needs {missing}: {install}\n")


def test_a_port_in_use_is_one_line(run):
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        code, out, err = run("serve", "demo", "--port", port)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"--port {port}: Address already in use" in err


@pytest.mark.parametrize(
    "args, words",
    [
        ("--port 70000", "--port 70000: "),
        ("--host nowhere.invalid --port 0", "--host nowhere.invalid and --port 0: "),
        ("--draft demo --acceptance fast", "--acceptance 'fast': allowed are exact, rejection"),
        ("-k 3", "--num-speculative-tokens 3 without a draft: give --draft too"),
        ("--log-format xml", "--log-format 'xml': allowed are text, json"),
        ("--tool-call-parser xml", "--tool-call-parser xml: allowed are auto, hermes, llama3_json"),
        ("--reasoning-parser x", "--reasoning-parser x: allowed are auto, think, deepseek_r1"),
        ("--generation-config no", "--generation-config no: allowed are auto, none"),
        ("--chat-template nowhere", "--chat-template nowhere: No such file"),
        ("--shutdown-timeout -1", "--shutdown-timeout -1"),
        ("--record pyproject.toml", "--record pyproject.toml"),
    ],
)
def test_a_mistake_is_one_line(run, args, words):
    code, out, err = run("serve", "demo", *args.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_invalid_jinja_is_refused(run, tmp_path):
    (tmp_path / "jinja").write_text("{% for m in messages %}")
    code, out, err = run("serve", "demo", "--chat-template", str(tmp_path / "jinja"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--chat-template is no valid Jinja: " in err


@pytest.mark.parametrize("key", ["", "schl\u00fcssel"])
def test_a_key_that_no_header_can_carry_is_refused(run, monkeypatch, key):
    monkeypatch.setenv("SPECDEC_API_KEY", key)
    code, _, err = run("serve", "demo")
    assert code == 2
    assert "--api-key: give a key" in err


def test_small_pieces_are_sent_without_delay():
    with listen("127.0.0.1", 0) as address:
        assert address.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize(
    "args, words",
    [
        ("x", "URL x: give one that begins with http"),
        ("http://127.0.0.1:9", "http://127.0.0.1:9/v1/models: "),
        ("http://x --request-rate 1,0", "--request-rate 1,0: give numbers of at least 0.001"),
        ("http://x --timeout 0", "--timeout 0.0: give a number from 0.001"),
        ("http://x --goodput ttft", "--goodput ttft: give any of ttft, tpot, itl, e2e"),
        ("http://x --json nowhere/a.json", "there is no directory nowhere"),
        ("http://x --json tests", "--json tests: a directory; give a file"),
        ("http://x --charts x", '--charts x: charts need matplotlib: pip install "specdec[bench]"'),
        ("", "missing argument 'URL' (see specdec bench serve --help)"),
    ],
)
def test_a_mistake_with_a_url_is_one_line(run, without, args, words):
    without("matplotlib")
    code, out, err = run("bench", "serve", *args.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_a_key_is_not_in_the_command_that_figures_name():
    given = ["bench", "serve", "http://x", "--api-key", "secret", "--seed", "1", "--api-key=secret"]
    shown = _without_keys(given)
    assert "secret" not in " ".join(shown)
    assert shown[:4] + shown[5:7] == given[:4] + given[5:7]
