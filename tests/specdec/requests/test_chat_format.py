"""Parts of a content, tools, more variables and unfinished messages, as templates get them."""

import json

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


ONE = [{"type": "text", "text": "ab"}]
MIXED = """{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}
{%- endfor %}{% else %}BRANCH{% endif %}{% endfor %}"""
IS_STRING = "{{ m.content if m.content is string else '?' }}"


@pytest.mark.parametrize(
    "branch, text",
    [
        ("{{ m.content }}", "a\nb"),
        ("{{ m.content | tojson }}", '"a\\nb"'),
        ("{{ m.content | tojson(indent=1) }}", '"a\\nb"'),
        ("{{ {'x': m.content} | tojson }}", '{"x": "a\\nb"}'),
        ("{{ m.content | trim }}", "a\nb"),
        ("{{ '' + m.content + '!' }}", "a\nb!"),
        ("{{ m.content.strip() }}", "a\nb"),
        ("{{ m['content'] ~ '' }}", "a\nb"),
        ("{{ '%s' | format(m.content) }}", "a\nb"),
        (IS_STRING, "a\nb"),
        ("{% if m.content is not string %}{{ raise_exception('?') }}{% endif %}-", "-"),
        ("{% for p in m.content %}{{ p['text'] if p is mapping else p }}{% endfor %}", "ab"),
        ("{% for p in m.content %}{{ p | tojson }}{% endfor %}", None),  # as transformers
        ("{{ m.content | map(attribute='text') | join('+') }}", "a+b"),
        ("{{ m.content | selectattr('type', 'equalto', 'text') | list | length }}", "2"),
        ("{{ m.content[0].text }}", "a\nb"),  # one part is all that it reads
        ("{{ m.content is iterable }}{{ m.content }}", "Truea\nb"),
    ],
)
def test_parts_are_a_text_in_the_branches_that_read_none(branch, text):
    messages = [{"role": "user", "content": PARTS}, {"role": "tool", "content": PARTS}]
    template = MIXED.replace("BRANCH", branch)
    text = "".join(json.dumps(each) for each in PARTS) if text is None else text
    assert DEMO.write_chat(messages, ChatFormat(chat_template=template)) == "ab" + text


@pytest.mark.parametrize(
    "branch",
    [
        "{{ m.content }}",
        "{{ m.content | tojson }}",
        "{{ m.content | trim }}",
        "{{ m.content[0] ~ m.content[1:] ~ m.content | length ~ m.content | first }}",
        "{% for c in m.content %}{{ loop.index }}{{ c }}{{ c | upper }}{{ 'a' + c }}{% endfor %}",
        "{{ m.content is string }}{{ m.content is iterable }}{{ m.content is mapping }}",
        "{{ m.content | list }}{{ m.content | reverse }}{{ m.content.split('b') }}",
        "{{ m.content == 'ab ' }}{{ 'b' in m.content }}{{ m.content in ['ab '] }}{{ m | tojson }}",
        "{{ {'ab ': 1}[m.content] }}{{ m.content * 2 }}{{ '%s' % m.content }}{{ [m.content] }}",
        "{{ '{}'.format(m.content) }}{{ m.content.format(1) }}{{ m.content is sameas m.content }}",
        "{{ m.content.text }}{{ m.content.content is defined }}{{ m.content is none }}",
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_text_is_a_text_in_every_way_that_transformers_offers(role, branch):
    template = MIXED.replace("== 'user'", "== 'loops'").replace("BRANCH", branch)
    messages = [{"role": role, "content": "ab "}]
    theirs = DEMO.in_transformers.apply_chat_template(
        messages, tokenize=False, chat_template=template
    )
    form = ChatFormat(chat_template=template, add_generation_prompt=False)
    assert DEMO.write_chat(messages, form) == theirs


NULLS = [
    ("{{ m.content is none }}{{ m.content is not none }}{{ m.content == none }}", "TrueFalseTrue"),
    ("{{ m.content is string }}{{ m.content is mapping }}{{ not m.content }}", "FalseFalseTrue"),
    ("<{{ m.content }}{{ m.content | trim }}{{ '' ~ m.content }}{{ m.content.strip() }}>", "<>"),
    ("<{{ 'a' + m.content + 'b' }}{{ m.content + 'c' }}{{ m.content | length }}>", "<abc0>"),
    ("<{% for p in m.content %}{{ p.text }}{% endfor %}{{ 'x' in m.content }}>", "<False>"),
    ("{{ m.content | tojson }}{{ [m.content] | tojson }}", "null[null]"),
    (
        "{{ m.content | default('d', true) }}{{ m.content or 'e' }}{{ m.content is defined }}",
        "deTrue",
    ),
]


@pytest.mark.parametrize("template, text", NULLS)
@pytest.mark.parametrize("content", [{"content": None}, {}], ids=["null", "missing"])
def test_a_content_that_is_null_is_none_and_is_written_as_no_text(template, text, content):
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "tool_calls": [call], **content}]
    template = "{% set m = messages[0] %}" + template
    assert DEMO.write_chat(messages, ChatFormat(chat_template=template)) == text


ARGUMENTS = [
    ("{{ a | tojson }}", '{"x": "é"}'),
    ("{{ a if a is string else a | tojson }}", '{"x": "é"}'),
    ("{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}{{ a is mapping }}", "x=éTrue"),
    ("{% for k, v in a | items %}{{ k }}={{ v }}{% endfor %}{{ a.x }}", "x=éé"),
    ("{{ call.function | tojson }}", '{"name": "f", "arguments": {"x": "é"}}'),
    ("{{ a }}", '{"x":"\\u00e9"}'),
    ("{{ '' ~ a }}{{ a | trim }}", '{"x":"\\u00e9"}' * 2),
    ("{{ '' + a + '' }}", '{"x":"\\u00e9"}'),
    ("{{ a.strip() }}", '{"x":"\\u00e9"}'),
    ("{{ a[1:-1] + '' }}", '"x":"\\u00e9"'),
]


@pytest.mark.parametrize("template, text", ARGUMENTS)
def test_arguments_are_an_object_or_text_as_the_template_takes_them(template, text):
    call = {"function": {"name": "f", "arguments": '{"x":"\\u00e9"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    head = "{% set call = messages[0].tool_calls[0] %}{% set a = call.function.arguments %}"
    assert DEMO.write_chat(messages, ChatFormat(chat_template=head + template)) == text


def test_an_error_that_no_form_of_the_arguments_mends_is_the_first_one():
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    template = "{{ raise_exception(messages[0].tool_calls[0].function.arguments is mapping) }}"
    with pytest.raises(ValueError, match=r"these messages: True$"):
        DEMO.write_chat(messages, ChatFormat(chat_template=template))


@pytest.mark.parametrize("content", ["a", ONE], ids=["text", "parts"])
def test_many_messages_are_written_within_the_time_of_a_template(content):
    messages = [{"role": "user", "content": content}] * 20_000
    form = ChatFormat(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert len(DEMO.write_chat(messages, form)) == len("ab" if content is ONE else "a") * 20_000


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
    theirs = DEMO.in_transformers.apply_chat_template(
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
