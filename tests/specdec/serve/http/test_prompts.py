"""Special tokens of prompts: those that are added, and those that a request's text spells."""

import asyncio

import pytest

from specdec.requests.tokenizer import Tokenizer
from specdec.serve.http.errors import ApiError
from specdec.serve.http.fields import TOKENIZE, known_fields
from specdec.serve.http.options import ServerOptions
from specdec.serve.http.prompts import Prompts
from weights.demo import demo_directory

TOKENIZER = Tokenizer(demo_directory("target"))
BOS, EOS = TOKENIZER.backend.bos_token_id, TOKENIZER.backend.eos_token_id
TEXT = "a<|eos|>b"
CHAT = {"messages": [{"role": "user", "content": TEXT}]}


def specials(encoded):
    return [each for each in encoded.token_ids if each in (BOS, EOS)]


def prompts(**options):
    return Prompts(TOKENIZER, 100, ServerOptions(host="", model_names=("m",), **options))


@pytest.mark.parametrize("parse_special", [True, False])
def test_special_tokens_are_read_as_the_server_was_told(parse_special):
    found = prompts(parse_special=parse_special)
    written = [EOS] if parse_special else []
    [completion] = asyncio.run(found.completion(TEXT))
    assert specials(completion) == [BOS, *written]
    chat = asyncio.run(found.chat(CHAT))
    assert specials(chat) == [BOS, *written]
    assert chat.text == "<|bos|>" + TEXT + "\n"
    assert specials(asyncio.run(found.tokenize({"prompt": TEXT}))) == [BOS, *written]
    assert specials(asyncio.run(found.tokenize(CHAT))) == [BOS, *written]


@pytest.mark.parametrize("body", [{"prompt": TEXT}, CHAT], ids=["prompt", "chat"])
def test_tokenize_reads_them_as_its_own_field_says(body):
    for server in (True, False):
        found = prompts(parse_special=server)
        for field in (True, False):
            encoded = asyncio.run(found.tokenize({**body, "parse_special": field}))
            assert specials(encoded) == [BOS, *[EOS] * field]
    with pytest.raises(ApiError, match="parse_special=1"):
        known_fields(TOKENIZE, {**body, "parse_special": 1})


@pytest.mark.parametrize("adds, count", [(None, 0), (False, 0), (True, 1)])
def test_special_tokens_are_added_as_a_request_says(adds, count):
    found = prompts()
    field = {} if adds is None else {"add_special_tokens": adds}
    alone = TOKENIZER.encode_word("ab")
    [completion] = asyncio.run(found.completion("ab", 1, adds is not False))
    assert completion.token_ids == ([] if adds is False else [BOS]) + alone
    encoded = asyncio.run(found.tokenize({"prompt": "ab", **field}))
    assert encoded.token_ids == completion.token_ids
    for write in (found.chat, found.tokenize):  # the template has written one
        assert specials(asyncio.run(write({**CHAT, **field}))) == [BOS] * (1 + count) + [EOS]


def test_completions_and_chats_over_http_take_the_field(live):
    body = {"prompt": "def", "max_tokens": 1, "return_token_ids": True}
    for fields, head in (({}, [BOS]), ({"add_special_tokens": False}, [])):
        [choice] = live.post("/v1/completions", {**body, **fields}).json()["choices"]
        assert choice["prompt_token_ids"] == head + TOKENIZER.encode_word("def")
    chat = {**CHAT, "max_tokens": 1, "return_token_ids": True, "add_special_tokens": True}
    [choice] = live.post("/v1/chat/completions", chat).json()["choices"]
    assert choice["prompt_token_ids"][:2] == [BOS, BOS]
