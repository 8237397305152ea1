"""What building an engine refuses, before anything large is read; and what it prints meanwhile."""

import sys
from contextlib import nullcontext

import pytest

import specdec.start.runners
from graphs import CUDAGraphMode
from specdec import LLM, SamplingParams
from specdec.engine import Engine


def test_both_checkpoints_are_looked_for_before_one_is_read(monkeypatch):
    monkeypatch.setattr(specdec.start.runners, "load_target", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ValueError, match="draft no/such/draft: no such directory"):
        LLM("demo", {"model": "no/such/draft"}, device="cpu")
    with pytest.raises(ValueError, match="target no/such/target: no such directory"):
        LLM("no/such/target", {"model": "demo"}, device="cpu")


@pytest.mark.parametrize(
    "is_terminal, options, is_shown",
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"use_tqdm_on_load": False}, False),
    ],
)
def test_reading_weights_is_shown_on_a_terminal_unless_it_is_not_wanted(
    monkeypatch, capfd, is_terminal, options, is_shown
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    LLM("demo", {"model": "demo"}, device="cpu", max_num_seqs=1, max_model_len=64, **options)
    assert ("B/s" in capfd.readouterr().err) == is_shown


@pytest.fixture(scope="module")
def llm():
    return LLM("demo", {"model": "demo"}, device="cpu", max_num_seqs=2, max_model_len=128)


@pytest.mark.parametrize(
    "is_terminal, use_tqdm, is_shown",
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_generating_is_shown_on_a_terminal_unless_it_is_not_wanted(
    llm, monkeypatch, capsys, is_terminal, use_tqdm, is_shown
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    llm.generate(["def f(", "x"], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=use_tqdm)
    shown = capsys.readouterr().err
    assert [word in shown for word in ("generating", "2/2", "tokens/s=", "acceptance length=")] == [
        is_shown
    ] * 4


@pytest.mark.parametrize("is_abort", [False, True])
def test_requests_that_are_broken_off_do_not_count_as_done(llm, monkeypatch, capsys, is_abort):
    real, steps = Engine._step, []

    def break_off(engine):
        steps.append(1)
        if len(steps) == 6:
            if not is_abort:
                raise KeyboardInterrupt
            engine.abort_all()  # as another thread's shutdown() does
        return real(engine)

    monkeypatch.setattr(Engine, "_step", break_off)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    lengths = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 60)]
    with nullcontext() if is_abort else pytest.raises(KeyboardInterrupt):
        llm.generate(["def f(", "x"], lengths)
    shown = capsys.readouterr().err
    assert "1/2" in shown
    assert "100%" not in shown
    assert not llm.engine.has_unfinished


def test_a_prompt_is_encoded_once_for_all_samples(llm, monkeypatch):
    encode = llm.tokenizer.encode
    texts = []
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text: texts.append(text) or encode(text))
    [request] = llm.engine.add_requests([("def f(", SamplingParams(n=16, seed=3))])
    assert texts == ["def f("]
    assert [sample.sampling.seed for sample in request.samples] == list(range(3, 19))
    llm.engine.abort(request.request_id)


CHAT_TEMPLATE = (
    "{% for m in messages %}# {{ m.content }}\n{% endfor %}{{ 'def' if add_generation_prompt }}"
)


def test_chat_answers_one_conversation_or_several(llm):
    first, second = ([{"role": "user", "content": word}] for word in ("sort a list", "read a file"))
    params = SamplingParams(temperature=0.0, max_tokens=6)
    both = llm.chat([first, second], params, use_tqdm=False, chat_template=CHAT_TEMPLATE)
    [one] = llm.chat(second, params, use_tqdm=False, chat_template=CHAT_TEMPLATE)
    assert both[0].prompt_token_ids == llm.tokenizer.encode_word("# sort a list\ndef")
    assert (
        one.outputs
        == both[1].outputs
        == llm.generate([one.prompt_token_ids], params, use_tqdm=False)[0].outputs
    )
    [bare] = llm.chat(
        first, params, False, add_generation_prompt=False, chat_template=CHAT_TEMPLATE
    )
    assert bare.prompt_token_ids == llm.tokenizer.encode_word("# sort a list\n")


@pytest.mark.parametrize(
    "messages", ["hi", [], [["hi"]], [{"role": "user", "content": "a"}, []], [[]]]
)
def test_invalid_conversations_are_refused(llm, messages):
    with pytest.raises(ValueError, match=r"give a list of messages|give \{"):
        llm.chat(messages, chat_template=CHAT_TEMPLATE)
    assert not llm.engine.has_unfinished


def test_a_stream_returns_the_whole_output(llm):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    pieces = []
    whole = []

    def consume():
        whole.append((yield from llm.stream("def f(", params)))

    pieces = list(consume())
    assert "".join(piece.text for piece in pieces) == whole[0].outputs[0].text
    assert (whole[0].finished, whole[0].stats.num_generated_tokens) == (True, 8)


def test_an_unread_stream_is_aborted(llm):
    pieces = llm.stream("def f(")
    assert llm.engine.has_unfinished
    del pieces
    assert not llm.engine.has_unfinished


def test_graph_counters_say_which_batches_ran_and_a_debug_line_sums_them_up(llm, caplog):
    caplog.set_level("DEBUG", logger="specdec")
    before = llm.graph_counters()["target_decode"].dispatches[CUDAGraphMode.NONE]
    [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=6, ignore_eos=True))
    counters = llm.graph_counters()
    assert (
        counters["target_decode"].dispatches[CUDAGraphMode.NONE] == before + output.stats.num_rounds
    )
    assert counters["target_prefill"].as_dict()["padded_tokens"] == 0
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("graphs: ")
    ]
    assert len(lines) == 1
    assert f"target_decode NONE {before + output.stats.num_rounds}, 0.0% padding" in lines[0]


def test_a_length_beyond_the_target_is_refused_before_weights_are_read(monkeypatch):
    monkeypatch.setattr(specdec.start.runners, "load_target", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ValueError, match="exceeds the target's max_position_embeddings=2048"):
        LLM("demo", max_model_len=4096)
