"""Answers that follow a grammar, and bad grammars that are a 400 and nothing more."""

import json
import re

import jsonschema
import pytest

from specdec import LLM, SamplingParams
from tests.specdec.guided.hostile import BAD, COSTLY

SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
GUIDED = {"json": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def is_size(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


FIELDS = [
    ({"response_format": FORMAT}, is_size),
    ({"response_format": {"type": "json_object"}, "seed": 5}, lambda text: text[0] == "{"),
    ({"response_format": {"type": "text"}, "guided_choice": ["yes"]}, "yes".__eq__),
    ({"structured_outputs": {"json": SCHEMA}}, is_size),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, is_size),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, re.compile("[ab]{3}").fullmatch),
    ({"structured_outputs": {"choice": ["left", "right"]}}, ["left", "right"].__contains__),
    ({"structured_outputs": {"grammar": 'start: "x" "y"+'}, "stop": "yy"}, re.compile("xy*").match),
    ({"guided_json": SCHEMA}, is_size),
    ({"guided_regex": "[0-9]{2}"}, re.compile("[0-9]{2}").fullmatch),
    ({"guided_choice": ["left", "right"]}, ["left", "right"].__contains__),
    ({"guided_grammar": 'start: "(" start ")" | "x"'}, re.compile(r"\(*x\)*").match),
    ({"guided_choice": ["ab"], "min_tokens": 40}, "ab".__eq__),
]


@pytest.mark.parametrize("fields, fits", FIELDS, ids=[str(list(fields)) for fields, _ in FIELDS])
def test_the_answer_follows_the_grammar(live, fields, fits):
    limits = {"temperature": 1, "seed": 3, "max_tokens": 120, "n": 2, **fields}
    found = live.post(CHAT, {"messages": [{"role": "user", "content": "def"}], **limits})
    assert found.status_code == 200, found.text
    for choice in found.json()["choices"]:
        assert fits(choice["message"]["content"])
    for choice in live.completion("def f(", **limits)["choices"]:
        assert fits(choice["text"])


def test_the_answer_is_that_of_generate_and_streams_in_pieces(live):
    fields = {"temperature": 1, "seed": 11, "max_tokens": 60}
    plain = LLM("demo", max_num_seqs=1, max_model_len=512, device="cpu")
    [expected] = plain.generate(
        "size = ", SamplingParams(**fields, structured_outputs={"json": SCHEMA}), use_tqdm=False
    )
    body = {"prompt": "size = ", **fields, "response_format": FORMAT}
    assert live.completion(**body)["choices"][0]["text"] == expected.outputs[0].text
    lines = live.post(COMPLETION, {**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(each["choices"][0]["text"] for each in events) == expected.outputs[0].text


@pytest.mark.parametrize("name", BAD)
def test_a_bad_grammar_is_a_400_with_the_compilers_message(live, name):
    values, words = BAD[name]
    for field in ("structured_outputs", GUIDED.get(next(iter(values)), "structured_outputs")):
        value = values if field == "structured_outputs" else next(iter(values.values()))
        for stream in (False, True):
            found = live.post(COMPLETION, {"prompt": "a", field: value, "stream": stream})
            assert found.status_code == 400, found.text
            error = found.json()["error"]
            assert error["param"] == field
            assert words[:20] in error["message"]
    assert live.completion("def f(", max_tokens=1)["choices"]


def of_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def test_an_unknown_format_is_no_error(live):
    schema = {"type": "string", "format": "password", "maxLength": 3}
    found = live.completion("a", response_format=of_schema(schema), max_tokens=60)
    assert len(json.loads(found["choices"][0]["text"])) <= 3


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"$ref": "#"}, "refers to itself"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance: 'lenient'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "write anyOf"),
    ],
)
def test_a_schema_that_is_refused_is_named_by_its_field(live, schema, words):
    for name, value in (("response_format", of_schema(schema)), ("guided_json", schema)):
        found = live.post(COMPLETION, {"prompt": "a", name: value})
        error = found.json()["error"]
        assert (found.status_code, error["param"]) == (400, name)
        assert words in error["message"]


# test_grammars.py has them all
@pytest.mark.parametrize(
    "name",
    [
        name if i % 3 == 0 else pytest.param(name, marks=pytest.mark.slow)
        for i, name in enumerate(COSTLY)
    ],
)
def test_a_costly_grammar_is_an_answer_or_a_400_and_the_server_goes_on(live, name):
    body = {"prompt": "a", "max_tokens": 4, "logit_bias": {"66": 100}, "seed": 1}
    found = live.post(COMPLETION, {**body, "structured_outputs": COSTLY[name]})
    assert found.status_code in (200, 400), found.text
    assert live.completion("def f(", max_tokens=1)["choices"]


WRONG = [
    ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": ["json_object"]}}, "response_format"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, "response_format"),
    ({"response_format": {**FORMAT, "schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": ["a"]}, "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize("fields, name", WRONG, ids=[str(fields)[:60] for fields, _ in WRONG])
def test_a_value_that_is_no_grammar_is_named(live, fields, name):
    found = live.post(COMPLETION, {"prompt": "a", "max_tokens": 1, **fields})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == name


def test_while_many_masks_take_too_long_new_grammars_wait_and_known_ones_do_not(live, monkeypatch):
    body = {"prompt": "a", "max_tokens": 2}
    known, other = ({**body, "structured_outputs": {"regex": r}} for r in ("ab+", "cd+"))
    assert live.post("/v1/completions", known).status_code == 200
    monkeypatch.setattr("specdec.guided.mask_threads.MOST_LEFT", 0)
    found = live.post("/v1/completions", other)
    assert (found.status_code, found.headers["Retry-After"]) == (503, "1")
    error = found.json()["error"]
    assert (error["code"], error["param"]) == ("grammars_busy", "structured_outputs")
    assert "masks that take too long" in error["message"]
    # callers of generate are no hostile clients
    [output] = LLM("demo", device="cpu", max_num_seqs=1, max_model_len=64).generate(
        ["a"], SamplingParams(max_tokens=2, structured_outputs={"regex": "ef+"}), use_tqdm=False
    )
    assert output.outputs[0].text.startswith("e")
    assert live.post("/v1/completions", known).status_code == 200
    monkeypatch.undo()
    assert live.post("/v1/completions", other).status_code == 200
