"""Conversations of every form, by templates of many families, beside transformers' rendering.

A list that a template reads part by part, transformers writes too. One that it does not read is a
text for us, and a repr or an error for transformers, which is asked with the text then.
"""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.requests.chat_format import ChatFormat
from specdec.requests.tokenizer import Tokenizer
from tests.specdec.requests.chat_families import FAMILIES

ARGUMENTS = '{"city": "K\\u00f6ln", "days":[1, 2]}'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It says <what> it's like.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    backend = Backend(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(directory)
    found = Tokenizer(directory)
    yield found
    found.close()


def call(arguments):
    function = {"name": "weather", "arguments": arguments}
    return {"id": "abcdef123", "type": "function", "function": function}


def conversation():
    """Every kind of message, all contents as texts."""
    return [
        {"role": "system", "content": " Be <brief> & 'kind'. "},
        {"role": "user", "content": "Is it\n{warm}\u00e9\U0001f642? "},
        {"role": "assistant", "content": "Where?"},
        {"role": "user", "content": "There"},
        {"role": "assistant", "content": None, "tool_calls": [call(ARGUMENTS)]},
        {
            "role": "tool",
            "name": "weather",
            "tool_call_id": "abcdef123",
            "content": '{"x": "\u00e9"}',
        },
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n[1, 3]"},
        {"role": "user", "content": "Thanks"},
    ]


def parts(text, count):
    cut = len(text) // 2
    texts = [text] if count == 1 else [text[:cut], text[cut:]]
    return [{"type": "text", "text": each} for each in texts]


def text_of(content):
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def theirs(tokenizer, family, messages, **options):
    """With each message in a form that the template can read."""
    readable = []
    for message in messages:
        found = dict(message)
        if message["content"] is None:
            found["content"] = None if family.asks_for_null else ""
        elif message["role"] not in family.reads:
            found["content"] = text_of(message["content"])
        if family.arguments is dict and "tool_calls" in message:
            found["tool_calls"] = [call(json.loads(ARGUMENTS))]
        readable.append(found)
    if family.asks_for_null:  # which apply_chat_template would drop
        variables = {**tokenizer.backend.special_tokens_map, **options}
        [text], _ = render_jinja_template([readable], chat_template=family.template, **variables)
        return text
    return tokenizer.in_transformers.apply_chat_template(
        readable, chat_template=family.template, tokenize=False, **options
    )


def check(tokenizer, family, messages, **options):
    form = ChatFormat(chat_template=family.template, **options)
    assert tokenizer.write_chat(messages, form) == theirs(tokenizer, family, messages, **options)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "options", [{}, {"tools": TOOLS}, {"add_generation_prompt": True}], ids=str
)
def test_texts_are_written_as_transformers_writes_them(tokenizer, name, options):
    family = FAMILIES[name]
    options = {"add_generation_prompt": False, **options}
    check(tokenizer, family, conversation(), **options)
    check(tokenizer, family, conversation()[1:], **options)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "all"])
@pytest.mark.parametrize("name", FAMILIES)
def test_lists_are_read_part_by_part_or_as_text(tokenizer, name, role, count):
    family = FAMILIES[name]
    messages = [
        each | {"content": parts(each["content"], count)}
        if role in (each["role"], "all") and each["content"] is not None
        else each
        for each in conversation()
    ]
    check(tokenizer, family, messages, add_generation_prompt=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_are_written_alike_as_an_object_and_as_its_text(tokenizer, name):
    family = FAMILIES[name]
    messages = conversation()
    check(tokenizer, family, messages, add_generation_prompt=True)
    form = ChatFormat(chat_template=family.template)
    given = tokenizer.write_chat(messages, form)
    messages[4] = messages[4] | {"tool_calls": [call(json.loads(ARGUMENTS))]}
    written = json.dumps(json.loads(ARGUMENTS), ensure_ascii=False)
    assert tokenizer.write_chat(messages, form) == given.replace(ARGUMENTS, written)


@pytest.mark.parametrize("content", ["Be kind.", parts("Be kind.", 1), parts("Be kind.", 2)])
def test_a_developer_speaks_where_the_template_knows_one(tokenizer, content):
    messages = [{"role": "developer", "content": content}, *conversation()[1:]]
    check(tokenizer, FAMILIES["harmony"], messages, add_generation_prompt=True)
