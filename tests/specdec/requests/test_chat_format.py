"""Parts of a content, tools, more variables and unfinished messages, as templates get them."""

import pytest

from specdec.requests.chat_format import ChatFormat
from specdec.requests.tokenizer import Tokenizer
from weights.demo import demo_directory

DEMO = Tokenizer(demo_directory("target"))
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
WHOLE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
LOOP = "{% for m in messages %}{% for p in m['content'] %}<{{ p.text }}>{% endfor %}{% endfor %}"
NAMED = "{% set c = messages[0].content %}{% for p in c %}<{{ p['text'] }}>{% endfor %}"


def written(content, template, content_format="auto", **more):
    form = ChatFormat(chat_template=template, chat_template_content_format=content_format, **more)
    return DEMO.write_chat([{"role": "user", "content": content}], form)


@pytest.mark.parametrize(
    "content, template, content_format, text",
    [
        (PARTS, WHOLE, "auto", "<a\nb>"),
        (PARTS, LOOP, "auto", "<a><b>"),
        (PARTS, NAMED, "auto", "<a><b>"),
        ("ab", LOOP, "auto", "<ab>"),
        ("ab", WHOLE, "auto", "<ab>"),
        (["a", "b"], WHOLE, "auto", "<a\nb>"),
        (PARTS, "{{ messages[0].content | length }}", "openai", "2"),
        (PARTS, "{{ messages[0].content }}", "string", "a\nb"),
        ("ab", "{{ messages[0].content[0].text }}", "openai", "ab"),
    ],
)
def test_parts_of_text_are_joined_unless_the_template_reads_them(
    content, template, content_format, text
):
    assert written(content, template, content_format) == text


def test_tools_documents_and_more_variables_reach_the_template():
    template = "{{ tools[0].name }} {{ documents[0].title }} {{ enable_thinking }} {{ none }}"
    more = {"tools": [{"name": "f"}], "documents": [{"title": "d"}]}
    text = written("a", template, chat_template_kwargs={"enable_thinking": False}, **more)
    assert text == "f d False None"


def test_a_tool_call_is_a_message_whose_arguments_are_read():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    template = "{{ messages[1].content }}{{ messages[1].tool_calls[0].function.arguments.x[0] }}"
    assert DEMO.write_chat(messages, ChatFormat(chat_template=template)) == "1"


TALK = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"


@pytest.mark.parametrize("arguments", ['{"x": 1,}', "[1]"])
def test_arguments_that_are_no_json_object_go_on_as_what_they_are(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    template = "{{ messages[0].tool_calls[0].function.arguments.INVALID_JSON }}"
    assert DEMO.write_chat(messages, ChatFormat(chat_template=template)) == arguments


TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}"


@pytest.mark.parametrize("template", [TALK, TRIMMED])
@pytest.mark.parametrize("last", ["def f(", "def f( ", " b\n", "a"])
def test_a_message_is_continued_as_by_transformers(template, last):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": last}]
    form = ChatFormat(
        chat_template=template, add_generation_prompt=False, continue_final_message=True
    )
    theirs = DEMO.backend.apply_chat_template(
        messages, tokenize=False, chat_template=template, continue_final_message=True
    )
    assert DEMO.write_chat(messages, form) == theirs


def test_a_message_that_the_template_does_not_write_is_not_continued():
    form = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(ValueError, match="does not write the last message's content"):
        written("a", "nothing", **form)


def test_a_template_is_read_from_a_file(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}!")
    assert written("a", str(file)) == written("a", file) == "a!"
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat.jinja': cannot be read"):
        written("a", file)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"continue_final_message": True}, "give add_generation_prompt=False"),
        ({"continue_final_message": 1}, "continue_final_message=1: give True or False"),
        ({"chat_template": 3}, "chat_template=3: give Jinja text"),
        ({"chat_template_content_format": "x"}, "allowed are auto, string, openai"),
        ({"tools": "f"}, "tools='f': give a list of dicts"),
        ({"documents": [1]}, r"documents=\[1\]: give a list of dicts"),
        ({"chat_template_kwargs": [1]}, "give {name: value}"),
        ({"chat_template_kwargs": {"messages": []}}, "messages has an argument of its own"),
        ({"chat_template_kwargs": {"chat_template": ""}}, "chat_template has an argument"),
    ],
)
def test_invalid_options_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        ChatFormat(**options)


@pytest.mark.parametrize(
    "message, words",
    [
        ({"role": "assistant", "tool_calls": "f"}, "tool_calls='f': give a list"),
        ({"role": "assistant", "tool_calls": ["f"]}, "a tool call is 'f'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "is .*image_url"),
    ],
)
def test_invalid_messages_are_refused(message, words):
    with pytest.raises(ValueError, match=words):
        DEMO.write_chat([message], ChatFormat(chat_template=WHOLE))


def test_a_template_file_of_gigabytes_is_refused_before_it_is_read(tmp_path):
    file = tmp_path / "long.jinja"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ValueError, match=f"{1 << 40} bytes, at most {1 << 20} are read"):
        ChatFormat(chat_template=file).template_text()
