"""Several threads on one LLM take turns at its steps; requests of all run in one batch."""

import threading

import pytest

from specdec import LLM, SamplingParams

DRAFT = {"model": "demo", "num_speculative_tokens": 3}
OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 320}
TEMPLATE = "{% for m in messages %}# {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def prompts(prompts):
    """Short ones, of 25 and 49 tokens, and two of 97."""
    return prompts[1:9]


@pytest.fixture(
    params=[pytest.param(False, marks=pytest.mark.slow), True], ids=["one step", "ahead"]
)
def llm(request):
    return LLM("demo", DRAFT, **OPTIONS, async_scheduling=request.param)


def run_threads(calls):
    """What each call returns or raises, in threads that must end."""
    found = [None] * len(calls)

    def run(index):
        try:
            found[index] = calls[index]()
        except BaseException as error:
            found[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads)
    return found


def texts_of(llm, index, prompts):
    """A few calls of each kind, which differ from thread to thread."""
    params = SamplingParams(
        temperature=0.8, seed=index, max_tokens=4 + 3 * index, stop="zz", ignore_eos=True
    )
    found = [
        output.outputs[0].text
        for output in llm.generate(prompts[index % 4 : index % 4 + 2], params, use_tqdm=False)
    ]
    conversation = [{"role": "user", "content": f"sort {index} lists"}]
    [chat] = llm.chat(conversation, params, use_tqdm=False, chat_template=TEMPLATE)
    found += [
        chat.outputs[0].text,
        "".join(piece.text for piece in llm.stream(f"def f{index}(", params)),
    ]
    for piece in llm.stream(prompts[index], SamplingParams(temperature=0.0, max_tokens=200)):
        found.append(piece.token_ids[0])  # how many come at once depends on the steps of others
        break
    return found


@pytest.mark.parametrize("num_threads", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_threads_get_what_each_gets_alone(llm, prompts, num_threads):
    expected = [texts_of(llm, index, prompts) for index in range(num_threads)]
    assert (
        run_threads([lambda i=i: texts_of(llm, i, prompts) for i in range(num_threads)]) == expected
    )
    assert not llm.engine.has_unfinished
    llm.engine.drain()
    assert llm.engine.scheduler.pool.num_free == llm.sizes.num_kv_blocks


def test_a_step_interrupted_in_one_thread_lets_the_others_return(llm, greedy, prompts, monkeypatch):
    real = llm.engine.runner.run_step
    steps = []

    def fails_once(*args, **options):
        steps.append(threading.current_thread())
        if len(steps) == 12:
            raise RuntimeError("the device fell off the bus")
        return real(*args, **options)

    monkeypatch.setattr(llm.engine.runner, "run_step", fails_once)
    calls = [lambda i=i: llm.generate(prompts[i], greedy(60), use_tqdm=False) for i in range(4)]
    found = run_threads(calls)
    raised = [value for value in found if isinstance(value, RuntimeError)]
    others = [value[0].outputs[0] for value in found if isinstance(value, list)]
    assert [str(error) for error in raised] == ["the device fell off the bus"]
    assert len(others) == 3
    assert any("a step was interrupted" in (other.stop_reason or "") for other in others)
    assert (
        llm.generate(prompts[0], greedy(4), use_tqdm=False)[0].outputs[0].finish_reason == "length"
    )


def test_no_thread_waits_for_anothers_long_answer(llm, greedy, prompts):
    ended = []

    def ask(index, length):
        llm.generate(prompts[index], greedy(length), use_tqdm=False)
        ended.append(length)

    run_threads([lambda: ask(0, 60), *(lambda i=i: ask(i, 4) for i in range(1, 4))])
    assert ended == [4, 4, 4, 60]
