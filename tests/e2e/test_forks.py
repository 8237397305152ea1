"""What can be called, and what is refused: in a forked child, and on the llm of an AsyncLLM."""

import asyncio
import os
import threading

import pytest

from specdec import LLM, AsyncLLM, EngineDeadError, SamplingParams

DRAFT = {"model": "demo", "num_speculative_tokens": 3}
OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 320}
TEMPLATE = "{% for m in messages %}# {{ m.content }}\n{% endfor %}"


def in_child(function):
    """What a forked child says of it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(function())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    answers = []
    reader = threading.Thread(
        target=lambda: answers.append(os.read(read, 10_000).decode()), daemon=True
    )
    reader.start()
    reader.join(30)
    if not answers:
        os.kill(child, 9)
    os.waitpid(child, 0)
    return answers[0] if answers else "it waits"


async def last_of(outputs):
    return [output async for output in outputs][-1]


CALLS = {
    "generate": lambda llm: asyncio.run(
        last_of(llm.generate([5, 6, 7], SamplingParams(max_tokens=2)))
    ),
    "chat": lambda llm: asyncio.run(
        last_of(llm.chat([{"role": "user", "content": "x"}], chat_template=TEMPLATE))
    ),
    "abort": lambda llm: asyncio.run(llm.abort("x")),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_a_forked_child_is_told_that_the_engine_is_not_there(name):
    with AsyncLLM("demo", **OPTIONS) as llm:
        answer = in_child(lambda: CALLS[name](llm))
        assert answer.startswith(
            f"EngineDeadError: this AsyncLLM was built in process {os.getpid()}"
        )
        assert in_child(llm.shutdown) == "None"
        assert asyncio.run(last_of(llm.generate([5, 6, 7], SamplingParams(max_tokens=2)))).finished


def test_a_forked_child_generates_with_an_llm_of_its_own(greedy, prompts):
    llm = LLM("demo", DRAFT, **OPTIONS)

    def ask():
        return llm.generate(prompts[0], greedy(6), use_tqdm=False)[0].outputs[0].token_ids

    assert in_child(ask) == str(ask())


def test_the_llm_of_an_async_one_is_there_to_be_read():
    conversation = [{"role": "user", "content": "x"}]
    calls = [
        lambda llm: llm.generate("x"),
        lambda llm: llm.stream("x"),
        lambda llm: llm.chat(conversation, chat_template=TEMPLATE),
        lambda llm: llm.engine.add_requests([("x", SamplingParams())]),
        lambda llm: llm.engine.step(),
        lambda llm: llm.engine.abort("x"),
        lambda llm: llm.engine.abort_all(),
        lambda llm: llm.engine.drain(),
    ]
    with AsyncLLM("demo", DRAFT, **OPTIONS) as llm:
        for call in calls:
            with pytest.raises(RuntimeError, match="this engine belongs to an AsyncLLM"):
                call(llm.llm)
        assert llm.llm.sizes.max_num_seqs == OPTIONS["max_num_seqs"]
        assert llm.llm.tokenizer.decode(llm.llm.tokenizer.encode_word("def")) == "def"
    with pytest.raises(EngineDeadError):
        asyncio.run(last_of(llm.generate("x")))
