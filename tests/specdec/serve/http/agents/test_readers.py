"""Texts of answers as messages: the same however the text is cut, and nothing is ever lost.

But for markup that max_tokens has cut off, which is nobody's text.
"""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.requests.tokenizer import Detokenizer, Tokenizer
from specdec.serve.http.agents.answer_reading import (
    CALL_FORMATS,
    AnswerReading,
    Message,
    WholeCall,
)
from specdec.serve.http.agents.events import Arguments, Call
from specdec.serve.http.agents.tool_use import Tool, ToolUse
from weights.demo import demo_directory

FORMATS = {each.name: each for each in CALL_FORMATS}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "list": {"type": "array"},
        "any": {},
        "maybe": {"type": ["string", "null"]},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
USE = ToolUse((Tool("weather", PARAMETERS), Tool("now", {"type": "object"})), "auto")
DEMO = Tokenizer(demo_directory("target"))


def reading(name, *, thinks=True, is_open=False, most=None):
    use = ToolUse(USE.tools, USE.choice, None, most)
    return AnswerReading(FORMATS[name], use, thinks, is_open)


def read(found, pieces, is_cut=False):
    """The message of a stream, whose calls must come in order."""
    reader = found.reader()
    events = [event for piece in pieces for event in reader.push(piece)]
    events += reader.finish(is_cut)
    count = 0
    for event in events:
        count += isinstance(event, Call)
        if isinstance(event, Call | Arguments):
            assert event.index == count - 1
    assert reader.num_calls == count
    return Message.of(events)


def in_tokens(text):
    """The texts that the tokens of a text complete, one after another."""
    detokenizer = Detokenizer(DEMO)
    pieces = [detokenizer.push(token) for token in DEMO.encode_word(text)]
    assert "".join(pieces) == text
    return pieces


def message(content="", *calls, reasoning=""):
    return Message(content, reasoning, [WholeCall(*call) for call in calls])


NESTED = '{"city": "a \\"}{\\" </tool_call> \\u00e9\\\\", "list": [{"x": [[]]}, {}], "é": null}'
XML = "<tool_call>\n<function=weather>\n{}</function>\n</tool_call>"
CASES = [
    ("hermes", "Hello.", message("Hello.")),
    ("hermes", "", message()),
    ("hermes", " \n", message(" \n")),
    (
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
        message("", ("weather", '{"city": "Bonn"}')),
    ),
    (
        "hermes",
        'I look.\n\n<tool_call>\n{"name": "weather", "arguments": ' + NESTED + "}\n</tool_call>\n"
        '<tool_call>{"arguments": {}, "name": "now"}</tool_call>\nDone.',
        message("I look.\nDone.", ("weather", NESTED), ("now", "{}")),
    ),
    (
        "hermes",
        '<think>\nBoth?\n</think>\n\n<tool_call>{"name":"now"}</tool_call>',
        message("", ("now", "{}"), reasoning="Both?"),
    ),
    ("hermes", '<tool_call>{"name":"now","arguments":null}', message("", ("now", "{}"))),
    ("hermes", '<tool_call>{"name":"now","arguments":""}', message("", ("now", "{}"))),
    ("hermes", '<tool_call>{"name":"now","arguments":"{\n}"}', message("", ("now", "{\n}"))),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
        message("", ("now", '{"a": 1}')),
    ),
    (
        "hermes",  # the last bracket is missing
        '<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call><tool_call>{"name": "now"}',
        message("", ("now", '{"a": 1}'), ("now", "{}")),
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>\n \n', message("", ("now", "{}"))),
    (
        "hermes",  # cut by max_tokens
        '<tool_call>{"name": "now", "arguments": {"a": "b',
        message("", ("now", '{"a": "b')),
    ),
    *[
        ("hermes", text, message(text))
        for text in (
            "<tool_call>",
            "a < b <tool_cal",
            "<tool_call>\nno JSON</tool_call>",
            '<tool_call>{"name": "now", "argu',
            '<tool_call>{"name": "now", "arguments":',
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"arguments": {"name": "now"}}</tool_call>',
            "<tool_call>{{{{</tool_call>",
            '<tool_call>{"": 1}',
            "text <think>no beginning</think>",
        )
    ],
    ("hermes", "<think>\n\n</think>\n\nYes", message("Yes")),
    ("hermes", " <think> a\n\nb </think>c", message("c", reasoning="a\n\nb")),
    ("hermes", "<think>never closed </thin", message(reasoning="never closed </thin")),
    (
        "hermes",
        '<think>I could <tool_call>{"name": "now"}</tool_call></think>or not',
        message("or not", reasoning='I could <tool_call>{"name": "now"}</tool_call>'),
    ),
    (
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Bonn"}}',
        message("", ("weather", '{"city": "Bonn"}')),
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "weather", "parameters": '
        + NESTED
        + "}\n",
        message("", ("now", "{}"), ("weather", NESTED)),
    ),
    (
        "llama3_json",
        '{"name": "now", "parameters": {}}; and more',
        message("; and more", ("now", "{}")),
    ),
    *[
        ("llama3_json", text, message(text))
        for text in (
            '{"name": "Bob", "age": 3}',
            '{"size": 3} {"name": "now", "parameters": {}}',
            'text {"name": "now", "parameters": {}}',
            '{"name": "now"',
            "{}",
            "<|python_tag|>print(1)",
            "<|python",
        )
    ],
    (
        "qwen3_xml",
        "I look.\n"
        + XML.format("<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n3\n</parameter>\n"),
        message("I look.", ("weather", '{"city": "Bonn", "days": 3}')),
    ),
    (
        "qwen3_xml",
        XML.format('<parameter=city>\n\n"é"\n\n</parameter>\n<parameter=new>1</parameter>\n')
        + "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        message("", ("weather", '{"city": "\\n\\"é\\"\\n", "new": "1"}'), ("now", "{}")),
    ),
    (
        "qwen3_xml",
        XML.format(
            "<parameter=list>[1, {}]</parameter><parameter=any>\nNone\n</parameter>"
            "<parameter=maybe>\nnull\n</parameter><parameter=unit>\nC\n</parameter>"
            "<parameter=days>\nmany\n</parameter>"
        ),
        message(
            "",
            (
                "weather",
                '{"list": [1, {}], "any": null, "maybe": null, "unit": "C", "days": "many"}',
            ),
        ),
    ),
    (
        "qwen3_xml",
        "<function=now>\n<parameter=a>\nx\n</parameter>\n</tool_call>bye",
        message("bye", ("now", '{"a": "x"}')),
    ),
    (
        "qwen3_xml",
        "<tool_call>\n<function=now>\n<parameter=a>\nx",
        message("", ("now", '{"a": "x')),
    ),
    *[
        ("qwen3_xml", text, message(text))
        for text in ("<tool_call>\n{}", "<function=", "<function=a\n>", "<tool_call><function=>")
    ],
]


@pytest.mark.parametrize("name, text, expected", CASES, ids=[f"{c[0]}-{c[1][:40]}" for c in CASES])
def test_a_text_is_read_alike_whole_and_in_deltas_of_1_to_20_tokens(name, text, expected):
    found = reading(name)
    assert found.message(text) == expected
    assert read(found, text) == expected  # a character at a time
    tokens = in_tokens(text)
    for count in range(1, 21):
        pieces = ["".join(tokens[i : i + count]) for i in range(0, len(tokens), count)]
        assert read(found, pieces) == expected, count


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<function=", ">"),
    *("<parameter=", "</parameter>", "</function>", '{"name": "', '"arguments": ', '"parameters":'),
    *('"', "\\", "\\u12", "{", "}", "[", "]", ":", ",", " ", "\n", "a", "é", "\U0001f642", "null"),
    *('{"name": "now", "arguments": {"a": 1}}', '{"name": "now", "parameters": {}}', "now", "days"),
]


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=30).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.booleans(),
)
def test_garbage_is_read_alike_however_it_is_cut(name, text, lengths, is_open):
    found = reading(name, is_open=is_open)
    pieces, start = [], 0
    while start < len(text):
        length = lengths[len(pieces) % len(lengths)]
        pieces.append(text[start : start + length])
        start += length
    whole = found.message(text)
    assert read(found, pieces) == whole
    assert read(found, pieces, is_cut=True) == found.message(text, is_cut=True)
    if not whole.calls and not whole.reasoning and "think>" not in text:
        assert whole.content == text or is_open


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["hermes", "llama3_json"]),
    st.lists(st.dictionaries(st.text(max_size=6), VALUES, max_size=4), min_size=1, max_size=3),
    st.integers(1, 30),
)
def test_calls_come_back_as_they_were_written(name, calls, length):
    key, separator = {"hermes": ("arguments", "\n"), "llama3_json": ("parameters", "; ")}[name]
    texts = [json.dumps({"name": "now", key: each}, ensure_ascii=False) for each in calls]
    if name == "hermes":
        texts = [f"<tool_call>\n{each}\n</tool_call>" for each in texts]
    text = separator.join(texts)
    found = read(reading(name), [text[i : i + length] for i in range(0, len(text), length)])
    assert [json.loads(call.arguments) for call in found.calls] == calls
    assert found.content == ""


ANSWERS = {
    "hermes": [
        'I look.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "<b>", "x": [{}]}}\n'
        '</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"id": {"a": "b"}, "arguments": {"name": "a"}, "name": "now"}</tool_call>',
    ],
    "llama3_json": [
        '{"name": "weather", "parameters": {"city": "<b>", "x": [{}]}}; {"name": "now", '
        '"parameters": {}};\n<|python_tag|>{"name": "weather", "parameters": {"a": "}"}}',
        '<|python_tag|>{"name": "now", "parameters": {}}\n',
    ],
    "qwen3_xml": [
        "I look.\n\n"
        + XML.format("<parameter=city>\n<b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n")
        + "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<function=weather>\n<parameter=list>\n[1, 2]\n</parameter>\n</function>",
    ],
}


TAGS = ("<tool_call>", "<function=", "<think>", "</think>", "<|python_tag|>")
BEGINNINGS = [tag[:end] for tag in TAGS for end in range((len(tag) + 1) // 2)]


def begins(whole, cut):
    """Whether a text is the beginning of another, but for less than half of a tag."""
    return any(whole.startswith(cut.removesuffix(each).rstrip()) for each in BEGINNINGS)


@pytest.mark.parametrize("head", ["", "<think>\nhm\n</think>\n\n"], ids=["", "thinking"])
@pytest.mark.parametrize("name", ANSWERS)
def test_markup_that_max_tokens_cuts_off_is_no_content(name, head):
    found = reading(name)
    for answer in ANSWERS[name]:
        text = head + answer
        whole = found.message(text, is_cut=True)
        assert whole == found.message(text)
        for end in range(len(text)):
            cut = found.message(text[:end], is_cut=True)
            assert read(found, text[:end], is_cut=True) == cut, text[:end]
            assert begins(whole.content, cut.content), text[:end]
            assert begins(whole.reasoning, cut.reasoning), text[:end]
            names = [call.name for call in whole.calls[: len(cut.calls)]]
            assert [call.name for call in cut.calls] == names, text[:end]
            for call, complete in zip(cut.calls, whole.calls, strict=False):
                assert complete.arguments.startswith(call.arguments), text[:end]


@pytest.mark.parametrize(
    "name, text, content, arguments",
    [
        ("hermes", "<tool_call>", "", None),
        ("hermes", "Yes. <tool_c", "Yes.", None),
        ("hermes", '<tool_call>\n{"name": "we', "", None),
        ("hermes", '<tool_call>\n{"name": "weather", "argum', "", None),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n</tool_', "", "{}"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<', "", "{}"),
        ("hermes", "<tool_call>\nno JSON", "<tool_call>\nno JSON", None),
        ("hermes", '<tool_call>{"x": 1}', '<tool_call>{"x": 1}', None),
        ("hermes", "a < b and c <", "a < b and c <", None),
        ("hermes", "<t", "<t", None),
        ("llama3_json", '{"name": "weat', "", None),
        ("llama3_json", "<|python_tag|>", "", None),
        ("llama3_json", '<|python_tag|>{"na', "", None),
        ("llama3_json", '{"name": "Bob", "age', '{"name": "Bob", "age', None),
        ("llama3_json", '{"size": {"x', '{"size": {"x', None),
        ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "w', "", "{}"),
        ("llama3_json", "<|python_tag|>print(1", "<|python_tag|>print(1", None),
        ("qwen3_xml", "<tool_call>\n<func", "", None),
        ("qwen3_xml", "<tool_call>\n<function=wea", "", None),
        ("qwen3_xml", "<tool_call>\n<function=now>\n<param", "", "{"),
        ("qwen3_xml", "<tool_call>\n<function=now>\n<parameter=ci", "", "{"),
        ("qwen3_xml", "<function=now>\n<parameter=a>\nx\n</para", "", '{"a": "x'),
        ("qwen3_xml", "<function=now>\n</func", "", "{}"),
        ("qwen3_xml", "<function=now>\n</function>\n</tool_c", "", "{}"),
        ("qwen3_xml", "<tool_call>\nno function", "<tool_call>\nno function", None),
    ],
)
def test_a_cut_call_is_told_from_text_that_begins_like_one(name, text, content, arguments):
    found = reading(name)
    message = found.message(text, is_cut=True)
    assert read(found, text, is_cut=True) == message
    assert (message.content, [call.arguments for call in message.calls]) == (
        content,
        [] if arguments is None else [arguments],
    )


def test_a_prompt_that_opens_the_reasoning_needs_no_opening_tag():
    found = reading("hermes", is_open=True)
    assert read(found, "hm\n</think>\n\nYes") == message("Yes", reasoning="hm")
    assert read(found, "<think>\nhm</think>Yes") == message("Yes", reasoning="hm")
    assert read(found, "only this") == message(reasoning="only this")


def test_a_reader_without_formats_passes_text_on():
    text = '<think>a</think><tool_call>{"name": "now"}'
    assert read(AnswerReading(), text) == message(text)


def test_at_most_one_call_is_passed_on_where_calls_may_not_be_parallel():
    text = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "weather"}</tool_call>'
    assert read(reading("hermes", most=1), text) == message("", ("now", "{}"))


def test_arguments_come_before_the_call_is_complete():
    reader = reading("hermes").reader()
    assert reader.push('<tool_call>{"name": "now", "arguments": {"a": "b') == [
        Call(0, "now"),
        Arguments(0, '{"a": "b'),
    ]
    assert reader.push('c"') == [Arguments(0, 'c"')]
    reader = reading("qwen3_xml").reader()
    reader.push("<tool_call>\n<function=weather>\n<parameter=city>\nBo")
    assert reader.push("nn") == [Arguments(0, "nn")]


@pytest.mark.parametrize(
    "name, head",
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "'),
        ("qwen3_xml", "<tool_call><function=weather><parameter=city>"),
        ("qwen3_xml", "<tool_call><function=weather><parameter=list>"),
        ("llama3_json", '{"size": "'),
        ("hermes", "<think>"),
        ("hermes", ""),
    ],
)
def test_a_huge_answer_takes_time_in_proportion(name, head):
    reader = reading(name).reader()
    begin = time.process_time()
    for piece in [head, *['x<\\" {'] * 20_000]:
        reader.push(piece)
    reader.finish()
    assert time.process_time() - begin < 10
