"""Whatever a body holds, the answer is a 4xx in OpenAI's form and the engine goes on."""

import codecs
import json
import random
import time

import pytest

from specdec.serve.http.fields import CHAT, COMPLETION, DETOKENIZE, FIELDS, TOKENIZE

GOOD = {
    CHAT: {"messages": [{"role": "user", "content": "def f("}], "max_tokens": 2},
    COMPLETION: {"prompt": "def f(", "max_tokens": 2},
    TOKENIZE: {"prompt": "def f("},
    DETOKENIZE: {"tokens": [5]},
}
VALUES = [
    *(True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**4000, 0.5, -0.0, 1e30, 1e-300),
    *("", "x", "\ud800", "\x00", "0", "1e9", "x" * 300, "{{ 1/0 }}"),
    *([], [[]], [None], [1, "a"], [[1], ["a"]], [True], [-1], [4095], [4096], [2**70], ["a"] * 40),
    *({}, {"": ""}, {"5": "x"}, {"x": 1}, {"5": 1e999}, {"9" * 20: 1}, {"messages": []}),
    *([{}], [{"role": "user"}], [{"role": "user", "content": None}], [{"role": [], "content": ""}]),
    *([{"role": "user", "content": "\ud800"}], [{"role": "user", "content": [{"type": "text"}]}]),
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{"}}]}],
]
BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "bad UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "a number beyond floats": b'{"prompt": "x", "temperature": 1e999}',
    "many lists": b'{"prompt": [' + b"[[[[]]]]," * 40_000 + b"[]]}",
    "many strings": b'{"prompt": [' + b'"",' * 270_000 + b'""]}',
    "many fields": json.dumps({f"a{i}": 1 for i in range(9000)}).encode(),
    "many choices": json.dumps(
        {"prompt": "x", "structured_outputs": {f"a{i}": 1 for i in range(8000)}}
    ).encode(),
    "a temperature of many values": json.dumps(
        {"prompt": "x", "temperature": [5] * 200_000}
    ).encode(),
    "a stop of lists": json.dumps({"prompt": "x", "stop": [[5] * 200_000]}).encode(),
    "a bias of a long id": json.dumps({"prompt": "x", "logit_bias": {"9" * 5000: 1}}).encode(),
    "a bias of no id": json.dumps({"prompt": "x", "logit_bias": {"\u0663": 1}}).encode(),
    "a long field": json.dumps({"prompt": "x", "y" * 100_000: 1}).encode(),
    "a field of control characters": json.dumps({"prompt": "x", "y\r\n\x1b[2J": 1}).encode(),
    "a limit of many digits": b'{"prompt": "x", "max_tokens": ' + b"9" * 4300 + b"}",
    "a number of many digits": b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
    "deep lists": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"prompt": "x", "metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    "a long prompt": json.dumps({"prompt": "def f(x)\n" * 500_000}).encode(),
    "many token ids": json.dumps({"prompt": [5] * 1_000_000}).encode(),
    "many prompts": json.dumps({"prompt": ["x"] * 100_000}).encode(),
    "many stops": json.dumps({"prompt": "x", "stop": ["y"] * 33}).encode(),
    "a long stop": json.dumps({"prompt": "x", "stop": "y" * 257}).encode(),
    "many biases": json.dumps(
        {"prompt": "x", "logit_bias": {str(i): 1 for i in range(2000)}}
    ).encode(),
    "too many samples": b'{"prompt": "x", "n": 129}',
    "too many logprobs": b'{"prompt": "x", "logprobs": 21}',
    "10 MB": b'{"prompt": "' + b"x" * 10_000_000 + b'"}',
}
TEMPLATES = {
    "an endless loop": "{% for i in range(10**9) %}{{ loop.index }}{% endfor %}",
    "much text": "{{ 'a' * 2000000000 }}",
    "an attribute of Python's": "{{ ().__class__.__base__.__subclasses__() }}",
    "an error": "{{ 1 / 0 }}",
    "no Jinja": "{% if %}",
    "a raise": "{{ raise_exception('no') }}",
}
LARGE = {"10 MB": 413}


def is_refusal(found):
    """A 4xx in OpenAI's form."""
    error = found.json()["error"]
    param = error["param"] or ""
    assert len(param) <= 100, param
    assert param.isprintable(), param
    has_form = set(error) == {"message", "type", "param", "code"} and len(found.content) < 2000
    return 400 <= found.status_code < 500 and has_form


@pytest.fixture(scope="module")
def live(serve):
    """A server whose context ends soon: answers without a limit are short."""
    with serve(sizes={"max_model_len": 64}, trust_request_chat_template=True) as found:
        yield found


@pytest.fixture(autouse=True)
def engine_goes_on(live):
    """It still answers after each test, and nothing is left running."""
    yield
    assert live.completion("def f(", max_tokens=2, temperature=0)["choices"]
    live.until_idle()


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_refused(live, name):
    headers = {"Content-Type": "application/json"}
    start = time.process_time()
    found = live.post("/v1/completions", content=BODIES[name], headers=headers)
    assert time.process_time() - start < 2
    assert is_refusal(found), found.text[:300]
    assert found.status_code == LARGE.get(name, 400)


@pytest.mark.parametrize("kind", GOOD)
def test_a_byte_order_mark_before_a_body_is_skipped(live, kind):
    body = codecs.BOM_UTF8 + json.dumps(GOOD[kind]).encode()
    found = live.post(kind, content=body, headers={"Content-Type": "application/json"})
    assert found.status_code == 200, found.text


@pytest.mark.parametrize("count", [1, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", GOOD)
def test_any_value_of_any_field_is_answered_or_refused(live, kind, count):
    names = [*FIELDS[kind]]
    chance = random.Random(kind)
    for name in names:
        for value in chance.sample(VALUES, count):
            body = json.dumps({**GOOD[kind], "max_tokens": 2, name: value})
            if kind in (TOKENIZE, DETOKENIZE):
                body = json.dumps({**GOOD[kind], name: value})
            headers = {"Content-Type": "application/json"}
            found = live.post(kind, content=body, headers=headers)
            assert found.status_code == 200 or is_refusal(found), (body, found.text)


def test_random_bodies_of_many_fields_are_answered_or_refused(live):
    names = [*FIELDS[COMPLETION]]
    chance = random.Random(0)
    for _ in range(50):
        some = {name: chance.choice(VALUES) for name in chance.sample(names, 3)}
        found = live.post(
            "/v1/completions",
            content=json.dumps({**GOOD[COMPLETION], **some}),
            headers={"Content-Type": "application/json"},
        )
        assert found.status_code == 200 or is_refusal(found), (some, found.text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_chat_template_is_refused(live, name):
    body = {**GOOD[CHAT], "chat_template": TEMPLATES[name]}
    found = live.post("/v1/chat/completions", body)
    assert is_refusal(found), found.text


@pytest.mark.parametrize("name", ["/etc/passwd", "default", "\n"])
def test_a_chat_template_is_never_a_file(live, name):
    body = {**GOOD[CHAT], "chat_template": name}
    found = live.post("/v1/chat/completions", body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "chat_template")


@pytest.mark.parametrize("name", ["chat_template", "messages", "add_generation_prompt", "tools"])
def test_template_variables_replace_no_argument(live, name):
    body = {**GOOD[CHAT], "chat_template_kwargs": {name: "{{ 1 }}"}}
    found = live.post("/v1/chat/completions", body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "chat_template_kwargs")
