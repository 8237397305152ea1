"""What a grammar of calls allows, its reader reads back; what it does not, the grammar refuses."""

import json
import random
import shutil

import jsonschema
import pytest

from specdec.guided.grammars import Grammars
from specdec.requests.tokenizer import Tokenizer
from specdec.serve.http.agents.answer_reading import (
    CALL_FORMATS,
    AnswerReading,
    WholeCall,
    answer_grammar,
)
from specdec.serve.http.agents.tool_use import Tool, ToolUse
from weights.demo import demo_directory

FORMATS = {each.name: each for each in CALL_FORMATS}
WEATHER = Tool(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 9},
            "days": {"$ref": "#/$defs/days"},
            "unit": {"enum": ["C", "F"]},
            "on": {"type": ["boolean", "null"]},
        },
        "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
NOW = Tool("now", {"type": "object", "properties": {}, "additionalProperties": False})
ANSWER = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
DEMO = Tokenizer(demo_directory("target"))
GRAMMARS = Grammars(DEMO, 4096, [1])


def reading(name, choice="required", named=None, most=None, **more):
    return AnswerReading(FORMATS[name], ToolUse((WEATHER, NOW), choice, named, most), **more)


def fits(grammar, text, tokenizer=DEMO, grammars=GRAMMARS):
    """Whether a grammar allows this text and its end."""
    matcher = grammars.compile("lark", grammar)
    for token in tokenizer.encode_word(text):
        if not matcher.masks([])[0][token // 8] >> token % 8 & 1:
            return False
        matcher.advance([token])
    return matcher.is_complete


def walked(grammar, seed, most=400):
    """A random text of a grammar: tokens are drawn among those that are allowed."""
    chance = random.Random(seed)
    matcher = GRAMMARS.compile("lark", grammar)
    tokens = []
    while len(tokens) < most and not (matcher.is_complete and chance.random() < 0.5):
        mask = matcher.masks([])[0]
        allowed = [i for i in range(4096) if mask[i // 8] >> i % 8 & 1 and i != 1]
        if not allowed:
            break
        token = chance.choice(allowed)
        tokens.append(token)
        matcher.advance([token])
    return DEMO.decode(tokens, False), matcher.is_complete


CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": %s}',
    "qwen3_xml": "<tool_call>\n<function=weather>\n%s</function>\n</tool_call>",
}
RIGHT = {"city": "Bonn", "days": 3, "unit": "C", "on": None}
WRONG = [
    {"city": "Bonn"},
    {"city": "Bonn", "days": 10},
    {"city": "Bonn am Rhein", "days": 1},
    {"city": "Bonn", "days": 1, "unit": "K"},
    {"city": "Bonn", "days": 1, "x": 1},
]


def written(name, arguments):
    if name != "qwen3_xml":
        return CALLS[name] % json.dumps(arguments)
    values = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in arguments.items()
    }
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return CALLS[name] % "".join(parts)


@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_allows_calls_that_fit_their_schema_and_no_others(name):
    grammar = answer_grammar(set(), reading(name), None)
    text = written(name, RIGHT)
    assert fits(grammar, text)
    assert reading(name).message(text).calls == [WholeCall("weather", json.dumps(RIGHT))]
    for arguments in WRONG:
        assert not fits(grammar, written(name, arguments)), arguments
    assert not fits(grammar, "Hello")
    assert not fits(grammar, "")


@pytest.mark.parametrize("name", FORMATS)
def test_as_many_calls_are_allowed_as_the_request_says(name):
    one = written(name, {"city": "Bonn", "days": 3})
    two = one + FORMATS[name].separator + one
    assert fits(answer_grammar(set(), reading(name), None), two)
    assert not fits(answer_grammar(set(), reading(name, most=1), None), two)
    named = answer_grammar(set(), reading(name, named="now", most=1), None)
    assert not fits(named, one)
    assert len(reading(name).message(two).calls) == 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FORMATS)
def test_random_texts_of_a_grammar_are_read_back_as_valid_calls(name, seed):
    found = reading(name, most=1)
    text, is_complete = walked(answer_grammar(set(), found, None), seed)
    assert is_complete, text
    message = found.message(text)
    [call] = message.calls
    schema = {"weather": WEATHER, "now": NOW}[call.name].parameters
    jsonschema.validate(json.loads(call.arguments), schema)
    assert message.content == ""


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml"])
def test_calls_or_an_answer_by_a_schema(name):
    grammar = answer_grammar(set(), reading(name, "auto"), ANSWER)
    assert fits(grammar, '{"ok": true}')
    assert fits(grammar, written(name, RIGHT))
    assert not fits(grammar, '{"ok": 1}')
    assert not fits(answer_grammar(set(), reading(name, "required"), ANSWER), '{"ok": true}')


@pytest.mark.parametrize("key", ["", "a>b", "a\nb", " a"])
def test_a_parameter_that_would_not_be_read_back_is_refused(key):
    tool = Tool("bad", {"type": "object", "properties": {key: {"type": "string"}}})
    found = AnswerReading(FORMATS["qwen3_xml"], ToolUse((tool,), "required"))
    with pytest.raises(ValueError, match="tools: 'bad' has a parameter"):
        answer_grammar(set(), found, None)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_that_the_compiler_does_not_know_is_an_annotation(name):
    secret = {"type": "object", "properties": {"a": {"type": "integer", "format": "int32"}}}
    both = {"type": "object", "properties": {"a": {"items": {"format": "int32"}}}}
    for parameters in (secret, both):
        use = ToolUse((Tool("keep", parameters),), "required")
        GRAMMARS.compile("lark", answer_grammar((), AnswerReading(FORMATS[name], use), None))


@pytest.mark.parametrize("name", FORMATS)
def test_parameters_that_never_end_are_refused(name):
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    endless |= {"$defs": {"b": endless}, "properties": {"a": {"$ref": "#/$defs/b"}}}
    use = ToolUse((WEATHER, Tool("keep", endless)), "required")
    words = r"tools\[1\]: parameters of 'keep': the schema refers to itself"
    with pytest.raises(ValueError, match=words):
        answer_grammar((), AnswerReading(FORMATS[name], use), None)


def test_guidance_counts_beside_tools_too():
    schema = {**ANSWER, "x-guidance": {"whitespace_pattern": ""}}
    grammar = answer_grammar((), reading("hermes", "auto"), schema)
    assert fits(grammar, '{"ok":true}')
    assert not fits(grammar, '{"ok": true}')


def test_reasoning_comes_before_the_calls():
    call = written("hermes", RIGHT)
    opened = answer_grammar(set(), reading("hermes", thinks=True, is_open=True), None)
    assert fits(opened, f"so {{ and <so>\n</think>\n\n{call}")
    assert not fits(opened, call)
    may = answer_grammar(set(), reading("hermes", thinks=True), None)
    assert fits(may, f"<think>so\n</think>{call}")
    assert fits(may, call)
    assert not fits(may, f"so</think>{call}")


@pytest.fixture(scope="module")
def special(tmp_path_factory):
    """A tokenizer in which the tags are special tokens, and its compiler of grammars."""
    directory = tmp_path_factory.mktemp("tokenizer")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_directory("target") / file, directory)
    tokenizer = Tokenizer(directory)
    tags = ["<tool_call>", "</tool_call>", "</think>"]
    changed = tokenizer.in_transformers
    changed.add_special_tokens({"extra_special_tokens": tags})
    changed.save_pretrained(directory)
    tokenizer = Tokenizer(directory)
    return tokenizer, Grammars(tokenizer, 4099, [1])


def test_tags_that_are_special_tokens_are_written_as_such(special):
    tokenizer, grammars = special
    found = reading("hermes", thinks=True, is_open=True)
    tags = {*tokenizer.backend.all_special_tokens, "[x]"}
    assert {"<tool_call>", "</tool_call>", "</think>"} <= tags
    text = f"hm</think>\n\n{written('hermes', RIGHT)}"
    assert fits(answer_grammar(tags, found, None), text, tokenizer, grammars)
    assert not fits(answer_grammar(set(), found, None), text, tokenizer, grammars)
