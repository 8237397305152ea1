"""Each field of the table works, changes nothing, or is a 400 that names it."""

import json
from contextlib import ExitStack

import pytest

from specdec.serve.http.fields import CHAT, COMPLETION, DETOKENIZE, FIELDS, TOKENIZE

TEXT = (CHAT, COMPLETION)
ROUTES = {
    CHAT: (CHAT, {"messages": [{"role": "user", "content": "def f("}]}),
    COMPLETION: (COMPLETION, {"prompt": "def f("}),
    TOKENIZE: (TOKENIZE, {"prompt": "def f("}),
    DETOKENIZE: (DETOKENIZE, {"tokens": [5, 6]}),
}
# a value for each field that works, and what else it needs
WORKING = {
    "model": "demo",
    "messages": [{"role": "developer", "content": [{"type": "text", "text": "def f("}]}],
    "prompt": "def f(",
    "add_generation_prompt": False,
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": {"continue_final_message": True, "add_generation_prompt": False},
    "add_special_tokens": False,
    "parse_special": False,
    "return_token_strs": True,
    "tokens": [5],
    "max_completion_tokens": 2,
    "top_logprobs": {"top_logprobs": 2, "logprobs": True},
    "documents": [{"title": "a", "text": "b"}],
    "echo": True,
    "max_tokens": 2,
    "n": 2,
    "stream": True,
    "stream_options": {
        "stream_options": {
            "include_usage": True,
            "continuous_usage_stats": True,
            "include_obfuscation": True,
        },
        "stream": True,
    },
    "seed": 1,
    "stop": ["\n", ":"],
    "logprobs": {CHAT: True, COMPLETION: 2},
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 4,
    "min_p": 0.1,
    "logit_bias": {"5": -100},
    "bad_words": ["self", "return x"],
    "allowed_token_ids": [5, 6, 7],
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.5,
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "speculate": False,
    "num_speculative_tokens": 1,
    "show_drafts": True,
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"choice": ["yes", "no"]}},
    "guided_json": {"guided_json": {"type": "integer"}},
    "guided_regex": "[0-9]+",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'start: "yes" | "no"',
    "tools": {"tools": []},
    "tool_choice": "none",
    "parallel_tool_calls": False,
}
# they need a template that reads them: test_tool_calls.py has one
BY_TEMPLATE = {"reasoning_effort": "low"}
# they work on a server that allows them
ALLOWED = {"chat_template": "{{ messages[0].content }}", "priority": 1}
OF_CONVERSATIONS = {*FIELDS[CHAT]} & {*FIELDS[TOKENIZE]} - {"model"}
CASES = [(kind, name, field) for kind in ROUTES for name, field in FIELDS[kind].items()]


def body_of(kind, name, value):
    """The route's own body with the field, and with what the field needs."""
    _, body = ROUTES[kind]
    if kind == TOKENIZE and name in OF_CONVERSATIONS:
        _, body = ROUTES[CHAT]
    if isinstance(value, dict) and kind in value:
        value = value[kind]
    fields = value if isinstance(value, dict) and name in value else {name: value}
    limit = {"max_tokens": 2} if kind in TEXT and name != "max_completion_tokens" else {}
    return {**body, **limit, **fields}


def test_the_examples_cover_the_table():
    working = {name for _, name, field in CASES if not field.refused and not field.is_harmless}
    assert set(WORKING) | set(ALLOWED) | set(BY_TEMPLATE) == working


@pytest.mark.parametrize("kind, name, field", CASES, ids=[f"{k}-{n}" for k, n, _ in CASES])
def test_a_field_works_or_changes_nothing_or_is_named(live, kind, name, field):
    path, body = ROUTES[kind]
    if field.refused:
        found = live.post(path, {**body, name: {"any": "value"}})
        assert found.status_code == 400
        assert found.json()["error"]["param"] == name
        assert name in found.json()["error"]["message"]
        for value in field.neutral:
            assert live.post(path, {**body, "max_tokens": 1, name: value}).status_code == 200
    elif field.is_harmless:
        given = {**body, "max_tokens": 2, "temperature": 0}
        plain = live.post(path, given).json()
        found = live.post(path, {**given, name: {"any": ["value"]}}).json()
        assert found["choices"] == plain["choices"]
    elif name in ALLOWED or name in BY_TEMPLATE:
        found = live.post(path, body_of(kind, name, {**ALLOWED, **BY_TEMPLATE}[name]))
        assert (found.status_code, found.json()["error"]["param"]) == (400, name)
    else:
        found = live.post(path, body_of(kind, name, WORKING[name]))
        assert found.status_code == 200, found.text


@pytest.mark.parametrize("name", ALLOWED)
def test_fields_that_must_be_allowed_work_where_they_are(trusting, name):
    found = trusting.post(ROUTES[CHAT][0], body_of(CHAT, name, ALLOWED[name]))
    assert found.status_code == 200, found.text


def test_an_unknown_field_is_named_with_the_likely_one(live):
    found = live.post("/v1/completions", {"prompt": "x", "tempature": 1})
    assert found.status_code == 400
    assert found.json()["error"] == {
        "message": "unknown field 'tempature'; did you mean temperature?",
        "type": "invalid_request_error",
        "param": "tempature",
        "code": None,
    }


def test_a_null_field_is_an_absent_one(live):
    body = dict.fromkeys(FIELDS[COMPLETION])
    given = {"prompt": "def f(", "ignore_eos": True}
    assert live.completion(**body | given)["usage"]["completion_tokens"] == 16


def test_unknown_fields_are_ignored_where_the_operator_says_so(serve):
    with serve(ignore_unknown=True) as live:
        assert live.completion("def f(", no_such_field=1, max_tokens=1)["choices"]


# sampling that test_load.py compares with LLM.generate has its effect shown there


def test_a_stop_string_is_part_of_the_text_where_it_should_be(live):
    fields = {"temperature": 0, "max_tokens": 40, "stop": "return"}
    plain, with_stop = (
        live.completion("def f(x):", **fields, include_stop_str_in_output=each)["choices"][0][
            "text"
        ]
        for each in (False, True)
    )
    assert with_stop == plain + "return"


def test_special_tokens_are_shown_where_they_should_be(live):
    fields = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "logit_bias": {"1": 100}}
    hidden, shown = (
        live.completion("def f(", **fields, skip_special_tokens=each)["choices"][0]["text"]
        for each in (True, False)
    )
    assert (hidden, shown) == ("", "<|eos|><|eos|>")


def test_only_the_allowed_tokens_are_written(live):
    fields = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
    plain = live.completion("def f(", **fields)["choices"][0]["token_ids"]
    allowed = [token for token in range(100, 200) if token not in plain]
    found = live.completion("def f(", **fields, allowed_token_ids=allowed)["choices"][0]
    assert len(found["token_ids"]) == 12
    assert set(found["token_ids"]) <= set(allowed)


def test_bad_words_are_not_written(live):
    fields = {"messages": [{"role": "user", "content": "def f("}], "temperature": 0}
    plain, without = (
        live.post(ROUTES[CHAT][0], {**fields, "max_tokens": 40, "bad_words": words}).json()
        for words in ([], ["return"])
    )
    plain, without = (each["choices"][0]["message"]["content"] for each in (plain, without))
    assert "return" in plain
    assert "return" not in without


CONTEXT = 64


@pytest.fixture(scope="module")
def short(serve):
    """A server whose context ends soon."""
    with serve(sizes={"max_model_len": CONTEXT}) as found:
        yield found


@pytest.mark.parametrize("kind", TEXT)
@pytest.mark.parametrize(
    "wide, same",
    [
        ({"seed": -5}, {"seed": 2**64 - 5}),
        ({"seed": 2**64 + 7}, {"seed": 7}),
        ({"seed": 7, "top_p": 0}, {"seed": 8, "top_k": 1}),
        ({"seed": 7, "top_p": 0.0}, {"seed": 8, "top_k": 1}),
        ({"seed": 7, "priority": 0}, {"seed": 7}),
    ],
)
def test_ranges_are_as_wide_as_those_of_openai_and_vllm(live, kind, wide, same):
    path, body = ROUTES[kind]
    found = [
        live.post(
            path, {**body, "max_tokens": 8, "temperature": 1, "return_token_ids": True, **each}
        )
        for each in (wide, same)
    ]
    ids = [each.json()["choices"][0]["token_ids"] for each in found]
    assert ids[0] == ids[1]


def test_a_seed_of_minus_one_is_drawn(live):
    fields = {"max_tokens": 24, "temperature": 2, "ignore_eos": True, "seed": -1}
    texts = {live.completion("def f(", **fields)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) > 1


@pytest.mark.parametrize(
    "kind, name",
    [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (COMPLETION, "max_tokens")],
)
def test_a_limit_beyond_the_context_is_refused_and_one_up_to_its_end_is_not(short, kind, name):
    path, body = ROUTES[kind]
    body = {**body, "temperature": 0, "ignore_eos": True}
    length = short.post(path, {**body, name: 1}).json()["usage"]["prompt_tokens"]
    room = CONTEXT - length
    assert room > 8
    found = short.post(path, {**body, name: room})
    assert found.json()["usage"]["completion_tokens"] == room
    for stream in (False, True):
        found = short.post(path, {**body, name: room + 1, "stream": stream})
        assert found.status_code == 400
        error = found.json()["error"]
        assert error["param"] == name
        what = "messages" if kind == CHAT else "prompt"
        parts = f"{length} in the {what}, {room + 1} in the completion"
        assert error["message"] == (
            f"This model's maximum context length is {CONTEXT} tokens. However, you requested "
            f"{CONTEXT + 1} tokens ({parts}). Please reduce the length of the {what} or "
            "completion. (context_length_exceeded)"
        )
        assert error["code"] == "context_length_exceeded"


def test_the_longest_of_several_prompts_counts_and_a_default_is_cut(live):
    prompts = [[5] * 3, [5] * 505]
    found = live.post(ROUTES[COMPLETION][0], {"prompt": prompts, "max_tokens": 8})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "max_tokens")
    for limit in ({}, {"max_tokens": None}, {"max_tokens": 7}):
        usage = live.completion(prompts[1], **limit, ignore_eos=True)["usage"]
        assert usage["completion_tokens"] == 7


WRONG = [
    ("bad_words", "self"),
    ("bad_words", [5]),
    ("bad_words", ["self", " "]),
    ("bad_words", {"self": 1}),
    ("bad_words", ["caf\ud800"]),
    ("bad_words", ["a b c d e f g h i j k l m n o p q r s t u v w x y z"]),
    ("bad_words", ["x" * 257]),
    ("bad_words", ["x"] * 65),
    ("allowed_token_ids", []),
    ("allowed_token_ids", "5"),
    ("allowed_token_ids", ["5"]),
    ("allowed_token_ids", [5.0]),
    ("allowed_token_ids", [True]),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [5, 4096]),
    ("allowed_token_ids", [5] * 65537),
    ("stop_token_ids", [4096]),
]


@pytest.mark.parametrize("kind", TEXT)
@pytest.mark.parametrize("name, value", WRONG, ids=[f"{n}-{v}"[:40] for n, v in WRONG])
def test_a_wrong_value_is_named(live, kind, name, value):
    path, body = ROUTES[kind]
    content = json.dumps({**body, "max_tokens": 2, name: value})
    found = live.post(path, content=content, headers={"Content-Type": "application/json"})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == name


@pytest.mark.parametrize(
    "path, name, value",
    [
        (COMPLETION, "bad_words", ""),
        (COMPLETION, "stop_token_ids", ""),
        (TOKENIZE, "add_generation_prompt", 1),
        (TOKENIZE, "chat_template_kwargs", []),
        ("/v1/messages", "stop_sequences", ""),
        ("/v1/messages", "stop_sequences", {}),
    ],
)
def test_a_wrong_value_is_refused_even_where_it_would_have_no_effect(live, path, name, value):
    good = {COMPLETION: ROUTES[COMPLETION][1], TOKENIZE: ROUTES[TOKENIZE][1]}
    body = good.get(path, {**ROUTES[CHAT][1], "max_tokens": 1})
    found = live.post(path, {**body, name: value})
    assert (found.status_code, name in found.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("fields, per_round", [({"speculate": False}, 0), ({}, 3)])
def test_a_request_drafts_as_much_as_it_says(live, fields, per_round):
    usage = live.completion("def f(", max_tokens=2, temperature=0, **fields)["usage"]
    details = usage["completion_tokens_details"]
    drafted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert drafted == per_round


@pytest.mark.parametrize(
    "template, fields, text",
    [
        ("{{ flag }}", {"chat_template_kwargs": {"flag": "yes"}}, "yes"),
        ("{{ documents[0].text }}", {"documents": [{"text": "a b"}]}, "a b"),
        ("a{% if add_generation_prompt %}b{% endif %}", {}, "ab"),
        ("a{% if add_generation_prompt %}b{% endif %}", {"add_generation_prompt": False}, "a"),
        ("{{ messages[0].role }}", {}, "system"),
        ("{{ messages[0].role }}{# developer #}", {}, "developer"),
        (
            "{{ messages[0].content }}<end>",
            {"continue_final_message": True, "add_generation_prompt": False},
            "def f(",
        ),
    ],
)
def test_what_a_template_is_given(serve_template, template, fields, text):
    live = serve_template(template)
    body = {"messages": [{"role": "developer", "content": "def f("}], **fields}
    found = live.post("/v1/chat/completions", {**body, "max_tokens": 1, "return_token_ids": True})
    ids = found.json()["choices"][0]["prompt_token_ids"]
    assert live.post("/detokenize", {"tokens": ids}).json()["prompt"] == text


@pytest.fixture
def serve_template(serve):
    """serve_template(text): a server with the operator's chat template."""
    with ExitStack() as stack:
        yield lambda text: stack.enter_context(serve(chat_template=text))
