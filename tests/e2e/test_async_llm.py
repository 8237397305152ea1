"""Requests from event loops over one background thread: the same outputs, and no endless wait."""

import asyncio
import gc
import itertools
import subprocess
import sys
import threading
import time
from contextlib import aclosing
from pathlib import Path
from unittest import mock

import pytest
import torch

from specdec import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    EngineDeadError,
    RequestOutput,
    SamplingParams,
)
from specdec.guided.guides import Guides
from specdec.requests.structured_outputs import StructuredOutputsParams
from specdec.requests.tokenizer import Tokenizer
from specdec.serve import async_llm
from specdec.serve.async_engine import Mailbox, Mailboxes

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 24
DRAFT = {"model": "demo", "num_speculative_tokens": 3}
TEMPLATE = "{{ messages[0].content }}"
OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 320, "async_scheduling": True}


@pytest.fixture(scope="module")
def shared():
    """An engine for tests that leave it whole."""
    with AsyncLLM("demo", DRAFT, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def own():
    """An engine that a test may break."""
    with AsyncLLM("demo", DRAFT, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def aborted(shared, monkeypatch):
    """The ids of requests that the engine was told to abort."""
    ids = []
    real = shared.llm.engine.abort
    monkeypatch.setattr(
        shared.llm.engine, "abort", lambda request_id: ids.append(request_id) or real(request_id)
    )
    return ids


async def outputs_of(outputs):
    return [output async for output in outputs]


async def last_of(outputs):
    return (await outputs_of(outputs))[-1]


async def until_idle(llm):
    """Wait until the engine's thread has nothing to do; returns the blocks that are free."""
    pool = llm.llm.engine.scheduler.pool
    while llm.llm.engine.has_unfinished or pool.num_free < llm.llm.sizes.num_kv_blocks:
        await asyncio.sleep(0.005)
    return pool.num_free


def fail_in_rounds(llm, monkeypatch, error):
    real = llm.llm.engine.runner.run_step

    def run_step(rows, *args, **options):
        if rows:
            raise error
        return real(rows, *args, **options)

    monkeypatch.setattr(llm.llm.engine.runner, "run_step", run_step)


@pytest.mark.parametrize(
    "ask, owner, name",
    [
        ("text", Tokenizer, "encode"),
        ("dict", Tokenizer, "encode"),
        ("chat", Tokenizer, "encode_word"),
        ("grammar", Guides, "compile"),
    ],
)
def test_steps_go_on_while_a_request_is_read(
    shared, demo_llm, greedy, monkeypatch, ask, owner, name
):
    """What reads it waits for tokens of another request; in the engine's thread, in vain."""
    text = "def add(first, second):"
    grammar = StructuredOutputsParams(choice=["one", "two"])
    params = (
        greedy(8)
        if ask != "grammar"
        else SamplingParams(temperature=0.0, structured_outputs=grammar)
    )
    monkeypatch.setattr(async_llm, "LONG_TEXT", len(text) if ask != "grammar" else 4096)
    grown, real = threading.Event(), getattr(owner, name)

    def waiting(*given, **more):
        assert grown.wait(timeout=20), f"no step while {name} ran"
        return real(*given, **more)

    def begin(llm):
        if ask == "chat":
            return llm.chat([{"role": "user", "content": text}], params, chat_template=TEMPLATE)
        return llm.generate({"prompt": text} if ask == "dict" else text, params)

    async def both():
        async with aclosing(shared.generate([5, 6, 7], greedy(200))) as outputs:
            await anext(outputs)
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, waiting)
                task = asyncio.create_task(last_of(begin(shared)))
                for _ in range(3):
                    await anext(outputs)
                grown.set()
                return await task

    found = asyncio.run(both())
    template = {"chat_template": TEMPLATE} if ask == "chat" else {}
    alone = demo_llm("demo", 3)
    how = alone.chat if ask == "chat" else alone.generate
    [expected] = how([{"role": "user", "content": text}] if template else text, params, **template)
    assert found.outputs == expected.outputs
    assert (found.prompt, found.prompt_token_ids) == (expected.prompt, expected.prompt_token_ids)


def test_concurrent_requests_give_what_generate_gives(shared, demo_llm, greedy, prompts):
    params = [greedy(length) for length in (1, 7, NUM_TOKENS, 30, 12, 3)]

    async def all_of_them():
        return await asyncio.gather(
            *(outputs_of(shared.generate(*pair)) for pair in zip(prompts, params, strict=False))
        )

    found = asyncio.run(all_of_them())
    expected = demo_llm("demo", 3).generate(prompts[: len(params)], params, use_tqdm=False)
    assert [outputs[-1].outputs for outputs in found] == [output.outputs for output in expected]
    assert [outputs[-1].stats.rounds for outputs in found] == [
        output.stats.rounds for output in expected
    ]
    assert len(found[3]) > 2


@pytest.mark.usefixtures("no_late_compilation")
@pytest.mark.gpu
def test_graphs_captured_in_one_thread_are_replayed_in_another(greedy, prompts):
    options = {"device": "cuda", "max_num_seqs": 8, "max_model_len": 320, "num_kv_blocks": 80}

    async def all_of_them():
        async with AsyncLLM("demo", DRAFT, **options) as llm:
            requests = (last_of(llm.generate(prompt, greedy(NUM_TOKENS))) for prompt in prompts[:8])
            return await asyncio.gather(*requests), llm.llm.engine.runner.graphs.counters()[
                "target_decode"
            ].replays

    found, replays = asyncio.run(all_of_them())
    expected = LLM("demo", DRAFT, **options).generate(
        prompts[:8], greedy(NUM_TOKENS), use_tqdm=False
    )
    assert [output.outputs for output in found] == [output.outputs for output in expected]
    assert replays.total() >= NUM_TOKENS // 4


def test_outputs_are_cumulative_snapshots_and_the_last_is_finished(shared, prompts):
    params = SamplingParams(
        temperature=0.8, seed=4, n=2, max_tokens=NUM_TOKENS, logprobs=1, ignore_eos=True
    )
    outputs = asyncio.run(outputs_of(shared.generate(prompts[5], params, request_id="mine")))

    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"mine"}
    for before, after in itertools.pairwise(outputs):
        for early, late in zip(before.outputs, after.outputs, strict=True):
            assert late.text.startswith(early.text)
            assert late.token_ids[: len(early.token_ids)] == early.token_ids
        assert before.stats.num_rounds <= after.stats.num_rounds
    assert outputs[1].stats.num_rounds < outputs[-1].stats.num_rounds


def test_statistics_of_an_output_do_not_change(shared, greedy, prompts):
    async def first_and_last():
        outputs = [
            (output, output.stats.num_rounds)
            async for output in shared.generate(prompts[0], greedy(NUM_TOKENS))
        ]
        return outputs[1], outputs[-1]

    (early, count), (late, _) = asyncio.run(first_and_last())
    assert early.stats.num_rounds == count < late.stats.num_rounds


def test_two_event_loops_share_the_engine(shared, greedy, prompts):
    found = {}

    def ask(index):
        found[index] = (
            asyncio.run(last_of(shared.generate(prompts[index], greedy(NUM_TOKENS))))
            .outputs[0]
            .token_ids
        )

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {index: len(tokens) for index, tokens in found.items()} == dict.fromkeys(
        range(3), NUM_TOKENS
    )


def test_a_slow_reader_gets_the_latest_output_and_delays_no_other(shared, greedy, prompts):
    async def slow_beside_fast():
        slow = shared.generate(prompts[0], greedy(NUM_TOKENS))
        seen = []
        async for output in slow:
            seen.append(len(output.outputs[0].token_ids))
            # another request runs from beginning to end meanwhile
            assert (await last_of(shared.generate(prompts[1], greedy(60)))).finished
        return seen

    seen = asyncio.run(slow_beside_fast())
    assert len(seen) == 2
    assert seen[-1] == NUM_TOKENS


def test_leaving_early_aborts_the_request(shared, aborted, greedy, prompts):
    async def leave():
        async with aclosing(shared.generate(prompts[0], greedy(200), "left")) as outputs:
            async for output in outputs:
                assert not output.finished
                break
        return await asyncio.wait_for(until_idle(shared), 20)

    assert asyncio.run(leave()) == shared.llm.sizes.num_kv_blocks
    assert len(aborted) == 1


def test_a_cancelled_task_aborts_its_request(shared, aborted, greedy, prompts):
    async def cancel():
        task = asyncio.create_task(outputs_of(shared.generate(prompts[0], greedy(200), "gone")))
        while not shared.llm.engine.has_unfinished:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        free = await asyncio.wait_for(until_idle(shared), 20)
        assert not await shared.abort("gone")
        return free

    assert asyncio.run(cancel()) == shared.llm.sizes.num_kv_blocks
    assert len(aborted) == 1


def test_aborted_requests_change_nothing_for_the_others(shared, demo_llm, greedy, prompts):
    params = greedy(NUM_TOKENS)

    async def ask(index):
        async with aclosing(shared.generate(prompts[index], params, priority=index % 3)) as outputs:
            async for output in outputs:
                if index % 2 and len(output.outputs[0].token_ids) > index:
                    break
        return output.outputs[0].token_ids

    async def all_of_them():
        found = await asyncio.gather(*map(ask, range(12)))
        await asyncio.wait_for(until_idle(shared), 20)
        return found

    found = asyncio.run(all_of_them())
    expected = [
        output.outputs[0].token_ids
        for output in demo_llm("demo", 3).generate(prompts[:12], params, False)
    ]
    assert found[::2] == expected[::2]
    assert all(
        tokens == whole[: len(tokens)] for tokens, whole in zip(found, expected, strict=True)
    )
    assert any(len(tokens) < NUM_TOKENS for tokens in found)


def test_an_aborted_request_yields_a_last_output(shared, greedy, prompts):
    async def abort():
        outputs = []
        async for output in shared.generate(prompts[0], greedy(200), "a"):
            outputs.append(output)
            if len(outputs) == 1:
                assert await shared.abort("a")
        return outputs, await shared.abort("a"), await shared.abort("never")

    outputs, again, never = asyncio.run(abort())
    assert (outputs[-1].finished, outputs[-1].outputs[0].finish_reason) == (True, "abort")
    assert 0 < len(outputs[-1].outputs[0].token_ids) < 200
    assert (again, never) == (False, False)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"prompt": []}, ValueError, "empty prompt"),
        ({"prompt": [99999]}, ValueError, "outside the target's vocabulary"),
        ({"prompt": [1] * 400}, ValueError, "leaves no room"),
        ({"prompt": None}, ValueError, "prompt=None: give text"),
        ({"prompt": "x", "sampling_params": {"n": 1}}, ValueError, "give SamplingParams"),
        ({"prompt": "x", "request_id": 7}, ValueError, "request_id=7"),
        ({"prompt": "x", "priority": "high"}, ValueError, "priority='high'"),
        ({"prompt": "x", "priority": True}, ValueError, "priority=True"),
        (
            {"prompt": "x", "sampling_params": 0},
            ValueError,
            "sampling_params=0: give SamplingParams",
        ),
        (
            {"prompt": "x", "sampling_params": torch.tensor([1, 2])},
            ValueError,
            "give SamplingParams",
        ),
        ({"prompt": {1: 2}}, ValueError, "a prompt does not take 1"),
    ],
)
def test_what_is_wrong_with_a_request_reaches_its_caller_only(
    shared, greedy, prompts, arguments, error, message
):
    async def both():
        good = last_of(shared.generate(prompts[2], greedy(8)))
        return await asyncio.gather(
            good, last_of(shared.generate(**arguments)), return_exceptions=True
        )

    good, bad = asyncio.run(both())
    assert good.outputs[0].finish_reason == "length"
    assert isinstance(bad, error)
    assert message is None or message in str(bad)


@pytest.mark.parametrize("request_id", [None, 7, ["a"], torch.tensor(1)])
def test_an_id_that_is_no_string_is_refused_and_the_engine_continues(
    shared, greedy, prompts, request_id
):
    with pytest.raises(ValueError, match=r"request_id=.*: give the string that names the request"):
        asyncio.run(shared.abort(request_id))
    assert asyncio.run(last_of(shared.generate(prompts[0], greedy(4)))).finished


def test_an_id_that_is_running_is_refused_and_its_owner_continues(shared, greedy, prompts):
    async def twice():
        first = asyncio.create_task(last_of(shared.generate(prompts[0], greedy(40), "same")))
        while not shared.llm.engine.has_unfinished:
            await asyncio.sleep(0.001)
        with pytest.raises(ValueError, match="'same' is already running"):
            await last_of(shared.generate(prompts[1], greedy(4), "same"))
        found = await first
        return found, await last_of(shared.generate(prompts[1], greedy(4), "same"))

    first, again = asyncio.run(twice())
    assert (first.outputs[0].finish_reason, len(first.outputs[0].token_ids)) == ("length", 40)
    assert len(again.outputs[0].token_ids) == 4


def test_a_failed_request_ends_with_error_and_the_others_continue(own, greedy, prompts):
    poison = 901
    embed = own.llm.engine.runner.target.model.embed_tokens
    # a copy, since the head shares it
    embed.weight = type(embed.weight)(embed.weight.clone(), requires_grad=False)
    embed.weight[poison] = float("nan")

    async def both():
        bad = last_of(own.generate([*prompts[1], poison, 5], greedy(NUM_TOKENS)))
        return await asyncio.gather(bad, last_of(own.generate(prompts[0], greedy(NUM_TOKENS))))

    bad, good = asyncio.run(both())
    assert (bad.finished, bad.outputs[0].finish_reason) == (True, "error")
    assert "not finite" in bad.outputs[0].stop_reason
    assert good.outputs[0].finish_reason == "length"


def test_a_failure_of_the_engine_reaches_every_waiting_and_later_call(
    own, greedy, prompts, monkeypatch
):
    cause = RuntimeError("the device fell off the bus")
    fail_in_rounds(own, monkeypatch, cause)

    async def all_of_them():
        waiting = [last_of(own.generate(prompt, greedy(NUM_TOKENS))) for prompt in prompts[:6]]
        found = await asyncio.gather(*waiting, return_exceptions=True)
        later = await asyncio.gather(
            last_of(own.generate("x")), own.abort("x"), return_exceptions=True
        )
        return found + later

    errors = asyncio.run(asyncio.wait_for(all_of_them(), 20))
    assert {type(error) for error in errors} == {EngineDeadError}
    assert {str(error) for error in errors} == {
        "the engine has failed: RuntimeError: the device fell off the bus"
    }
    assert {error.__cause__ for error in errors} == {cause}
    assert len({id(error) for error in errors}) == 8


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_gpu_that_frees_nothing_leaves_nobody_waiting(own, monkeypatch):
    cause = RuntimeError("the device fell off the bus")
    fail_in_rounds(own, monkeypatch, cause)

    def end_ranks():
        raise RuntimeError("nor are its graphs freed")

    monkeypatch.setattr(own.llm.engine, "end_ranks", end_ranks)
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        asyncio.run(asyncio.wait_for(last_of(own.generate("x")), 20))


def test_a_shutdown_aborts_what_runs_and_refuses_what_comes(own, greedy, prompts):
    async def shut_down():
        outputs = []
        async for output in own.generate(prompts[0], greedy(200)):
            outputs.append(output)
            await asyncio.to_thread(own.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await last_of(own.generate(prompts[0], greedy(4)))
        return outputs

    outputs = asyncio.run(shut_down())
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert not own._thread._thread.is_alive()
    own.shutdown()  # a second time has no effect


def test_a_loop_that_is_closed_aborts_its_requests(shared, aborted, greedy, prompts):
    async def begin():
        outputs = shared.generate(prompts[0], greedy(250), "orphan")
        await anext(outputs)
        return outputs

    loop = asyncio.new_event_loop()
    left = loop.run_until_complete(begin())
    loop.close()
    assert asyncio.run(asyncio.wait_for(until_idle(shared), 20)) == shared.llm.sizes.num_kv_blocks
    assert len(aborted) == 1
    assert asyncio.run(last_of(shared.generate(prompts[0], greedy(2)))).finished
    del left


def test_the_thread_sleeps_while_nothing_runs(shared, greedy, prompts, monkeypatch):
    asyncio.run(last_of(shared.generate(prompts[0], greedy(4))))
    monkeypatch.setattr(shared.llm.engine, "step", lambda: pytest.fail("a step without a request"))
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    assert shared._thread._thread.is_alive()


def test_the_thread_ends_when_its_owner_is_collected():
    llm = AsyncLLM("demo", **OPTIONS)
    thread = llm._thread._thread
    del llm
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "end",
    [
        "asyncio.run(begin()); sys.exit(3)",
        pytest.param("raise KeyError(3)", marks=pytest.mark.slow),
    ],
)
def test_the_interpreter_exits_without_a_shutdown(end):
    code = f"""
import asyncio, sys
from specdec import AsyncLLM, SamplingParams
llm = AsyncLLM("demo", {{"model": "demo"}}, device="cpu", max_num_seqs=1)
async def begin():
    async for output in llm.generate("def", SamplingParams(max_tokens=400, ignore_eos=True)):
        return
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (1 if "raise" in end else 3), done.stderr
    assert ("Traceback" in done.stderr) == ("raise" in end)


def test_chat_writes_the_conversation_by_its_template(shared, greedy):
    chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{{ '>' if add_generation_prompt }}"
    )
    messages = [{"role": "user", "content": "hi"}]
    output = asyncio.run(last_of(shared.chat(messages, greedy(4), chat_template=chat_template)))
    assert output.prompt_token_ids == shared.llm.tokenizer.encode_word("<user>hi>")
    assert len(output.outputs[0].token_ids) == 4
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}"  # the pair's
    expected = asyncio.run(last_of(shared.chat(messages, greedy(4), chat_template=template)))
    output = asyncio.run(last_of(shared.chat(messages, greedy(4))))
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert output.outputs == expected.outputs


def grown(text, name="0"):
    """A piece of one sample."""
    return RequestOutput(name, None, [], [CompletionOutput(0, text, [7])], False)


def test_outputs_that_were_not_fetched_come_as_one_and_wake_their_reader_once():
    async def read():
        mailbox = Mailbox("mine")
        first, second = map(grown, "ab")
        reader = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        mailbox.put(first)
        mailbox.put(second)  # after the reader is woken, before it looks
        found = await reader
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(mailbox.get(), 0.02)
        return found

    found = asyncio.run(read())
    assert found.outputs == [CompletionOutput(0, "ab", [7, 7])]
    assert found.request_id == "mine"


def test_one_call_wakes_all_readers_of_a_loop():
    async def read():
        loop = asyncio.get_running_loop()
        mailboxes, office = [Mailbox() for _ in range(3)], Mailboxes()
        for mailbox in mailboxes:
            office.add(mailbox)
        readers = [asyncio.create_task(mailbox.get()) for mailbox in mailboxes]
        await asyncio.sleep(0)
        with mock.patch.object(
            loop, "call_soon_threadsafe", wraps=loop.call_soon_threadsafe
        ) as wake:
            texts = zip("abc", mailboxes, strict=True)
            assert office.deliver([grown(text, mailbox.id) for text, mailbox in texts]) == []
            found = [(await reader).outputs[0].text for reader in readers]
            assert office.deliver([grown("d", mailboxes[1].id)]) == []
            again = (await mailboxes[1].get()).outputs[0].text
        return found, again, wake.call_count

    assert asyncio.run(read()) == (["a", "b", "c"], "d", 2)


def test_each_reader_gets_an_error_of_its_own_after_the_end():
    async def read():
        mailboxes, office = [Mailbox() for _ in range(2)], Mailboxes()
        for mailbox in mailboxes:
            office.add(mailbox)
        end = EngineDeadError("over")
        end.__cause__ = cause = KeyError()
        assert office.deliver(end) == []
        found = await asyncio.gather(*(each.get() for each in mailboxes), return_exceptions=True)
        assert [(str(each), each.__cause__) for each in found] == [("over", cause)] * 2
        return {id(each) for each in [*found, end]}

    assert len(asyncio.run(read())) == 3


def test_what_nobody_reads_is_named():
    async def opened():
        return Mailbox(), Mailbox()

    office = Mailboxes()
    kept, gone = asyncio.run(opened())  # whose loop is closed then
    for mailbox in (kept, gone):
        office.add(mailbox)
    names = [kept.id, gone.id]
    del mailbox, gone
    assert sorted(office.deliver([grown("a", name) for name in names])) == sorted(names)


def test_a_template_that_hangs_does_not_hold_up_other_requests(shared, greedy):
    hangs = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

    async def run():
        chat = asyncio.create_task(
            last_of(shared.chat([{"role": "user", "content": "a"}], chat_template=hangs))
        )
        await asyncio.sleep(0.1)
        output = await last_of(shared.generate([1, 2, 3], greedy(4)))
        is_over = chat.done()
        with pytest.raises(ValueError, match="stopped after 2 s"):
            await chat
        return output, is_over

    output, is_over = asyncio.run(run())
    assert len(output.outputs[0].token_ids) == 4
    assert not is_over
