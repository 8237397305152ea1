"""What does not fit into the context is told so that clients know it: they shorten it and retry."""

import json

import pytest
from openai import BadRequestError

from specdec.serve.http.batch import BatchLine, answer_line

LONG = "x = 1\n" * 600
LONGER = "x = 1\n" * 40_000  # more characters than the longest tokens of the context have
TURNS = [{"role": "user", "content": LONG}]
TOO_LONG = {
    "chat": ("/v1/chat/completions", {"messages": TURNS}, "messages"),
    "completion": ("/v1/completions", {"prompt": LONG}, "prompt"),
    "characters": ("/v1/completions", {"prompt": LONGER}, "prompt"),
    "token ids": ("/v1/completions", {"prompt": [5] * 512}, "prompt"),
    "one of several": ("/v1/completions", {"prompt": ["x", LONG]}, "prompt"),
    "response": ("/v1/responses", {"input": LONG}, "input"),
    "tokenize": ("/tokenize", {"prompt": LONG}, "prompt"),
    "detokenize": ("/detokenize", {"tokens": [5] * 512}, "tokens"),
    "chat's limit": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 512},
        "max_tokens",
    ),
    "completion's limit": ("/v1/completions", {"prompt": "x", "max_tokens": 512}, "max_tokens"),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_what_does_not_fit_has_the_code_and_the_words_of_openai(live, name):
    path, body, param = TOO_LONG[name]
    found = live.post(path, body)
    error = found.json()["error"]
    assert (found.status_code, error["code"]) == (400, "context_length_exceeded")
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith("This model's maximum context length is 512 tokens. ")


@pytest.mark.parametrize("name", ["chat", "completion", "chat's limit"])
def test_a_line_of_a_batch_has_them_too(live, name):
    path, body, param = TOO_LONG[name]
    line = BatchLine("a", path, json.dumps(body).encode())
    answered = live.run(answer_line(live.server.application.app, line))
    found = json.loads(answered.line)["response"]
    error = found["body"]["error"]
    assert (found["status_code"], error["param"]) == (400, param)
    assert error["code"] == "context_length_exceeded"


def test_a_message_of_anthropic_has_its_own_words(live):
    body = {"messages": TURNS, "max_tokens": 1}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        found = live.post(path, body)
        assert found.status_code == 400
        error = found.json()["error"]
        assert error["type"] == "invalid_request_error"
        words = error["message"].split()
        assert words[:4] == ["prompt", "is", "too", "long:"]
        assert int(words[4]) > int(words[7]) == 511
        assert words[5:7] + words[8:] == ["tokens", ">", "maximum"]


def test_the_openai_client_raises_a_bad_request(live):
    with live.openai() as client:
        with pytest.raises(BadRequestError) as chat:
            client.chat.completions.create(model="demo", messages=TURNS)
        with pytest.raises(BadRequestError) as response:
            client.responses.create(model="demo", input=LONG)
    for error in (chat.value, response.value):
        assert error.code == "context_length_exceeded"
        assert "maximum context length is 512 tokens" in error.message


def test_langchain_knows_it(live):
    models = pytest.importorskip("langchain_openai")
    errors = pytest.importorskip("langchain_core.exceptions")
    model = models.ChatOpenAI(
        model="demo", base_url=f"{live.url}/v1", api_key="none", max_retries=0
    )
    with pytest.raises(errors.ContextOverflowError):
        model.invoke(LONG)
    with pytest.raises(errors.ContextOverflowError):
        model.bind(max_tokens=512).invoke("x")


@pytest.mark.parametrize("model", ["openai/demo", "hosted_vllm/demo"])
def test_litellm_knows_it(live, model):
    litellm = pytest.importorskip("litellm")
    for messages, limit in ((TURNS, 1), ([{"role": "user", "content": "x"}], 512)):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(
                model=model,
                messages=messages,
                max_tokens=limit,
                api_base=f"{live.url}/v1",
                api_key="none",
                num_retries=0,
            )
