"""The openai package against the server: what its users do, with what they get."""

import pytest
from openai import BadRequestError, NotFoundError

from specdec import LLM, SamplingParams
from specdec.requests.output import Logprob
from specdec.serve.http.answers import best_by_text

MESSAGES = [{"role": "user", "content": "def fibonacci(n):"}]
PROMPT = "def fibonacci(n):"


@pytest.fixture(scope="module")
def client(live):
    with live.openai() as found:
        yield found


@pytest.fixture(scope="module")
def llm():
    draft = {"model": "demo", "num_speculative_tokens": 3}
    with LLM("demo", draft, device="cpu", max_num_seqs=4, max_model_len=512) as found:
        yield found


def generated(llm, prompt, **params):
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


def test_chat(client, llm):
    found = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=12, seed=7)
    expected = llm.chat(MESSAGES, SamplingParams(max_tokens=12, seed=7), use_tqdm=False)[0]
    assert found.object == "chat.completion"
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].message.content == expected.outputs[0].text
    assert found.choices[0].finish_reason == "length"
    assert found.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert found.usage.completion_tokens == 12
    details = found.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == expected.stats.num_accepted_tokens
    rejected = expected.stats.num_drafted_tokens - expected.stats.num_accepted_tokens
    assert details.rejected_prediction_tokens == rejected


def test_a_chat_without_a_limit_runs_to_the_end_of_the_context(client):
    messages = [{"role": "user", "content": "x = 1\n" * 120}]
    found = client.chat.completions.create(
        model="demo", messages=messages, temperature=0, extra_body={"ignore_eos": True}
    )
    assert found.usage.total_tokens == 512


def test_a_stream_of_chat_joins_to_the_whole_answer(client):
    fields = {"model": "demo", "messages": MESSAGES, "max_tokens": 20, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**fields)
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    for index in (0, 1):
        parts = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(part.delta.content or "" for part in parts) == (
            whole.choices[index].message.content
        )
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == whole.choices[index].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_usage_in_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=12, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_completion_with_n_and_seed(client, llm):
    found = client.completions.create(model="demo", prompt=PROMPT, n=2, seed=5)
    expected = generated(llm, PROMPT, n=2, seed=5, max_tokens=16)
    assert [choice.index for choice in found.choices] == [0, 1]
    assert [choice.text for choice in found.choices] == [each.text for each in expected.outputs]
    again = client.completions.create(model="demo", prompt=PROMPT, n=2, seed=5)
    assert [choice.text for choice in again.choices] == [choice.text for choice in found.choices]


def test_stop(client):
    found = client.completions.create(
        model="demo", prompt=PROMPT, temperature=0, max_tokens=60, stop=["return", "\n\n\n"]
    )
    assert found.choices[0].finish_reason == "stop"
    assert "return" not in found.choices[0].text
    assert found.choices[0].model_extra["stop_reason"] == "return"


def test_a_stream_never_shows_a_part_of_a_stop_string(client):
    fields = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 60}
    whole = client.completions.create(**fields, stop="return")
    chunks = client.completions.create(**fields, stop="return", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_lists_of_prompts(client, llm, prompts):
    texts = [PROMPT, "class A:"]
    found = client.completions.create(model="demo", prompt=texts, n=2, seed=1, max_tokens=6)
    expected = [
        each for text in texts for each in generated(llm, text, n=2, seed=1, max_tokens=6).outputs
    ]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in found.choices] == [each.text for each in expected]

    ids = [prompts[0][:20], prompts[1][:30]]
    found = client.completions.create(model="demo", prompt=ids, temperature=0, max_tokens=6)
    expected = [generated(llm, each, temperature=0, max_tokens=6) for each in ids]
    assert [choice.text for choice in found.choices] == [each.outputs[0].text for each in expected]
    assert found.usage.prompt_tokens == 50

    chunks = list(
        client.completions.create(
            model="demo", prompt=ids, temperature=0, max_tokens=6, stream=True
        )
    )
    for index in (0, 1):
        text = "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)
        assert text == found.choices[index].text


def test_logprobs_of_chat(client, llm):
    found = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=5, seed=2, logprobs=True, top_logprobs=3
    )
    params = SamplingParams(max_tokens=5, seed=2, logprobs=3)
    expected = llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0]
    content = found.choices[0].logprobs.content
    for token, ours, theirs in zip(expected.token_ids, content, expected.logprobs, strict=True):
        assert ours.logprob == theirs[token].logprob
        assert ours.token == theirs[token].decoded_token
        assert bytes(ours.bytes).decode() == ours.token
        ranked = sorted(theirs.values(), key=lambda each: each.rank)[:3]
        assert [(each.token, each.logprob) for each in ours.top_logprobs] == [
            (each.decoded_token, each.logprob) for each in ranked
        ]


def test_echo_with_logprobs(client, llm):
    found = client.completions.create(
        model="demo", prompt=PROMPT, echo=True, logprobs=2, temperature=0, max_tokens=4
    ).choices[0]
    expected = generated(llm, PROMPT, temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    assert found.text == PROMPT + expected.outputs[0].text
    ids = expected.prompt_token_ids + expected.outputs[0].token_ids
    rows = expected.prompt_logprobs[1:] + expected.outputs[0].logprobs
    assert found.logprobs.token_logprobs == [None] + [
        row[token].logprob for token, row in zip(ids[1:], rows, strict=True)
    ]
    for token, offset in zip(
        found.logprobs.tokens[1:], found.logprobs.text_offset[1:], strict=True
    ):
        assert found.text.startswith(token, offset)


def test_scoring_writes_nothing(client):
    found = client.completions.create(
        model="demo", prompt=[PROMPT, "x = 1"], echo=True, logprobs=0, max_tokens=0
    )
    assert [choice.text for choice in found.choices] == [PROMPT, "x = 1"]
    assert found.usage.completion_tokens == 0
    assert len(found.choices[1].logprobs.tokens) == len(found.choices[1].logprobs.token_logprobs)
    assert client.completions.create(model="demo", prompt="x", max_tokens=0).choices[0].text == ""


def test_echo_of_token_ids_in_a_stream(client, prompts):
    fields = {"model": "demo", "prompt": prompts[0][1:20], "echo": True, "temperature": 0}
    whole = client.completions.create(**fields, logprobs=1)
    chunks = list(client.completions.create(**fields, logprobs=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [x for chunk in chunks for x in getattr(chunk.choices[0].logprobs, name)]
        assert joined == getattr(whole.choices[0].logprobs, name)


FACE = "\N{GRINNING FACE}"
WRITES_FACES = {"structured_outputs": {"choice": [f"a{FACE}b"]}}


def bytes_of(key):
    """Of a token as completions name it."""
    if not key.startswith("bytes:"):
        return key.encode()
    return bytes.fromhex(key.removeprefix("bytes:").replace("\\x", ""))


@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_a_character_have_their_own_bytes(client, stream):
    found = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=20,
        stream=stream,
        extra_body=WRITES_FACES,
    )
    chunks = found if stream else [found]
    content = [token for chunk in chunks for token in chunk.choices[0].logprobs.content]
    assert b"".join(bytes(token.bytes) for token in content) == f"a{FACE}b<|eos|>".encode()
    assert len(content) > 3
    for token in content:
        assert len(token.top_logprobs) == 20
        assert len({tuple(each.bytes) for each in token.top_logprobs}) == 20


@pytest.mark.parametrize("stream", [False, True])
def test_completions_name_parts_of_a_character_by_their_bytes(client, stream):
    prompt = f"{FACE}x "
    found = client.completions.create(
        model="demo",
        prompt=prompt,
        logprobs=20,
        echo=True,
        stream=stream,
        max_tokens=20,
        extra_body=WRITES_FACES,
    )
    parts = [each.choices[0] for each in (found if stream else [found])]
    text = "".join(part.text for part in parts)
    assert text == f"{prompt}a{FACE}b"
    tokens = [token for part in parts for token in part.logprobs.tokens]
    assert tokens[0] == "<|bos|>"
    assert b"".join(map(bytes_of, tokens[1:])) == f"{text}<|eos|>".encode()
    assert sum(token.startswith("bytes:") for token in tokens) > 4
    offsets = [offset for part in parts for offset in part.logprobs.text_offset]
    for i, offset in enumerate(offsets[1:], start=1):
        before = b"".join(map(bytes_of, tokens[1:i]))
        assert text[offset:] == text.encode()[len(before) :].decode(errors="ignore")
    best = [row for part in parts for row in part.logprobs.top_logprobs]
    values = [value for part in parts for value in part.logprobs.token_logprobs]
    for token, value, row in zip(tokens[1:], values[1:], best[1:], strict=True):
        assert row[token] == value
        assert len(row) >= 20


def test_tokens_with_the_same_bytes_are_all_named():
    found = {7: Logprob(-3.0, 4, "a"), 1: Logprob(-0.5, 1, "a"), 2: Logprob(-1.0, 2, "")}
    named = best_by_text(7, found, 2, {7: b"a", 1: b"a", 2: b"<s>"}.__getitem__)
    assert named == {"token_id:1": -0.5, "<s>": -1.0, "a": -3.0}


def test_usage_says_what_was_found_in_the_cache(client, prompts):
    ids = [*prompts[0], *prompts[1], *prompts[2]][130:0:-1]  # no other test asks for it
    fields = {"model": "demo", "prompt": ids, "max_tokens": 1, "temperature": 0}
    for cached in (0, 128):
        usage = client.completions.create(**fields).usage
        assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (130, cached)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "specdec"


def test_errors_are_those_of_the_client(client):
    with pytest.raises(NotFoundError, match="served is demo"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(BadRequestError, match="temperature=-1"):
        client.completions.create(model="demo", prompt="x", temperature=-1)
    with pytest.raises(BadRequestError, match="tools: the chat template of this model knows no"):
        client.chat.completions.create(
            model="demo", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )
