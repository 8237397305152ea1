"""Short texts do not wait for long ones, and each waits its fair turn."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from specdec.requests.tokenizer import Tokenizer
from specdec.serve.http.lanes import MOST_VALUES, SHORT, Lane, size_of
from specdec.serve.http.options import ServerOptions
from specdec.serve.http.prompts import MOST_MESSAGES, Prompts
from weights.demo import demo_directory

CHAT = "/v1/chat/completions"
OPTIONS = ServerOptions(model_names=("m",))


async def served(lane, names):
    """In which order those are served that come while one has its turn."""
    order, is_running, may_end = [], threading.Event(), threading.Event()
    first = asyncio.create_task(lane.run(1, lambda _: is_running.set() or may_end.wait(20)))
    await asyncio.to_thread(is_running.wait, 20)
    tasks = [
        asyncio.create_task(lane.run(size, lambda _, name=name: order.append(name)))
        for name, size in names
    ]
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(first, *tasks)
    return order


@pytest.fixture
def lane():
    found = Lane(lambda: Tokenizer(demo_directory("target")))
    yield found
    found.close()


def test_a_small_work_goes_before_the_large_ones_that_wait(lane):
    names = [("a", 100), ("b", 100), ("small", 1), ("c", 100)]
    assert asyncio.run(served(lane, names)) == ["small", "a", "b", "c"]


def test_a_large_work_waits_for_no_more_than_its_size_of_small_ones(lane):
    async def run():
        order = []

        async def stream():
            for number in range(50):
                await lane.run(
                    10, lambda _, number=number: time.sleep(0.01) or order.append(number)
                )

        others = [asyncio.create_task(stream()) for _ in range(2)]
        await lane.run(10, lambda _: time.sleep(0.05))
        await lane.run(100, lambda _: order.append("large"))
        await asyncio.gather(*others)
        return order.index("large")

    assert asyncio.run(run()) <= 22  # of 100


def test_who_leaves_while_it_waits_or_in_its_turn_holds_up_nobody(lane):
    async def run():
        is_running, may_end = threading.Event(), threading.Event()
        works = (lambda _: is_running.set() or may_end.wait(20), lambda _: None)
        left = [asyncio.create_task(lane.run(1, each)) for each in works]
        await asyncio.to_thread(is_running.wait, 20)
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        may_end.set()
        return await asyncio.wait_for(served(lane, [("a", 1)]), 5)

    assert asyncio.run(run()) == ["a"]


def test_a_work_that_fails_tells_its_caller_alone(lane):
    async def run():
        with pytest.raises(ZeroDivisionError):
            await lane.run(1, lambda _: 1 // 0)
        return await lane.run(1, lambda _: "next")

    assert asyncio.run(run()) == "next"


def test_short_work_runs_beside_long_work_with_another_tokenizer():
    own = Tokenizer(demo_directory("target"))
    prompts, may_end = Prompts(own, 100, OPTIONS), threading.Event()
    run_one = prompts._in_thread

    async def run():
        long = asyncio.create_task(run_one(SHORT + 1, lambda each: may_end.wait(20) and each))
        short = [await run_one(SHORT, lambda each: each) for _ in range(3)]
        may_end.set()
        return await long, short

    long, short = asyncio.run(run())
    prompts.close()
    assert short == [own] * 3
    assert isinstance(long, Tokenizer)
    assert long is not own


def test_long_work_takes_no_thread_of_others():
    prompts = Prompts(Tokenizer(demo_directory("target")), 100, OPTIONS)
    may_end = threading.Event()

    async def run():
        long = [
            asyncio.create_task(prompts._in_thread(SHORT + 1, lambda each: may_end.wait(20)))
            for _ in range(64)
        ]
        await asyncio.sleep(0.05)
        found = await asyncio.wait_for(asyncio.to_thread(int), 5)
        may_end.set()
        await asyncio.gather(*long)
        return found

    assert asyncio.run(run()) == 0
    prompts.close()


def test_a_size_counts_text_wherever_it_is_and_ends_early():
    assert size_of({"a": ["x" * 100]}, None) > 100
    assert size_of({"y" * SHORT: 1}) > SHORT
    assert size_of(["x"] * MOST_VALUES) > SHORT
    assert size_of([[] for _ in range(10**6)]) < 2 * MOST_VALUES * 16 < 10**6
    assert size_of([{"role": "user", "content": "hello"}] * 100) < SHORT


def messages(number):
    return [{"role": "user", "content": "a"}] * number


TOO_MANY = {
    "messages": messages(MOST_MESSAGES + 1),
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}] * MOST_MESSAGES}],
    "calls": [{"role": "assistant", "tool_calls": [{}] * MOST_MESSAGES}],
}


@pytest.mark.parametrize("name", TOO_MANY)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_too_many_messages_are_a_400(live, name, path):
    found = live.post(path, {"messages": TOO_MANY[name]})
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, "messages")
    assert "4,097 messages, parts of them and calls, at most 4,096" in error["message"]


def test_as_many_messages_as_are_allowed_are_rendered(live):
    found = live.post("/tokenize", {"messages": messages(MOST_MESSAGES)})
    assert "tokens" in found.json()["error"]["message"]  # which are too many for the context


@pytest.mark.slow
@pytest.mark.parametrize("number, text", [(100_000, ""), (4000, "word " * 400)])
def test_heavy_chats_delay_no_small_one(serve, number, text, capsys):
    """number: of messages, in each of twelve chats at a time."""
    heavy = json.dumps({"messages": [{"role": "user", "content": text}] * number})
    small = {"messages": [{"role": "user", "content": "def"}], "max_tokens": 1}
    with serve(is_apart=True) as live, ThreadPoolExecutor(12) as pool:
        kind = {"Content-Type": "application/json"}

        def post():
            return live.post(CHAT, timeout=300, content=heavy.encode(), headers=kind)

        assert live.post(CHAT, small).status_code == 200
        began = time.monotonic()
        others = [pool.submit(post) for _ in range(12)]
        waits = []
        while not all(each.done() for each in others) or not waits:
            asked = time.monotonic()
            assert live.post(CHAT, small, timeout=300).status_code == 200
            waits.append(time.monotonic() - asked)
        whole = time.monotonic() - began
    with capsys.disabled():
        print(f"\n12 x {number} messages in {whole:.1f} s; small chats waited {max(waits):.1f} s")
    assert {each.result().status_code for each in others} <= {400, 413}
    # parsing the bodies holds the interpreter's lock; a turn of the templates would add seconds
    assert max(waits) < 6
