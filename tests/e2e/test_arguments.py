"""Bad input raises an error that names what was given and what to do, and leaves no trace."""

import numpy as np
import pytest
import torch

from specdec import LLM, SamplingParams, SpeculativeConfig


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: LLM("demo", gpu_memory=0.5), "LLM does not take gpu_memory"),
        (lambda: LLM("demo", max_num_seq=3), "did you mean max_num_seqs"),
        (lambda: LLM("demo", max_num_seqs=-1), "max_num_seqs=-1"),
        (lambda: LLM("demo", max_model_len=0), "max_model_len=0"),
        (
            lambda: LLM("demo", max_model_len=4096),
            "exceeds the target's max_position_embeddings=2048",
        ),
        (lambda: LLM("demo", device="tpu"), "give auto, cpu, cuda"),
        (lambda: LLM("demo", dtype="int8"), "dtype='int8'"),
        (lambda: LLM("no/such/place"), "no such directory"),
        (lambda: LLM("demo", {"model": "demo", "k": 3}), "SpeculativeConfig does not take k"),
        (lambda: LLM("demo", {"model": "demo", "method": "medusa"}), "method='medusa'"),
        (
            lambda: LLM("demo", {"num_speculative_tokens": 3}),
            "SpeculativeConfig needs model, which .*'num_spec",
        ),
        (lambda: LLM("demo", {"model": "demo", "aux_layers": 5}), "aux_layers=5: give a list"),
        (
            lambda: LLM("demo", {"model": "demo", "aux_layers": "123"}),
            "aux_layers='123': give a list",
        ),
        (lambda: LLM("demo", device=None), "device=None: give auto, cpu, cuda"),
        (
            lambda: LLM(None),
            "target None: give a directory, a hub id owner/name, demo or demo-experts",
        ),
        (lambda: LLM(""), "target '': give a directory"),
        (lambda: LLM("demo", {"model": None}), "model=None: give a directory"),
        (lambda: LLM("demo", {"model": "demo/eagle1", "method": "eagle3"}), "is an eagle draft"),
        (lambda: SpeculativeConfig("demo", num_speculative_tokens=-1), "num_speculative_tokens=-1"),
        (lambda: SamplingParams(temperature=0.0, max_token=3), "did you mean max_tokens"),
        (lambda: SamplingParams(temperature=0.0, max_tokens=-3), "max_tokens=-3"),
        (
            lambda: SamplingParams(temperature=0.0, max_tokens=3, max_new_tokens=3),
            "another name of max_tokens",
        ),
        (lambda: SamplingParams(temperature=0.0, max_tokens=3, min_tokens=4), "min_tokens=4"),
        (lambda: SamplingParams(temperature=0.0, stop=[""]), "non-empty"),
    ],
)
def test_constructors_refuse_what_they_cannot_do(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize(
    "prompt, params, words",
    [
        ([], {}, "empty prompt"),
        ([0] * 512, {}, "leaves no room"),
        ([0, 4096], {}, "token id 4096 is outside"),
        ([0, -1], {}, "token id -1 is outside"),
        ([0], {"stop_token_ids": [9999]}, "token id 9999 is outside"),
        ([1.7, 2], {}, r"prompt=\[1.7, 2\]: give text or a list of token ids"),
        (["a"], {}, r"prompt=\['a'\]: give text or a list of token ids"),
        (b"ab", {}, "prompt=b'ab': give text or a list of token ids"),
        ("caf\udce9", {}, r"'caf\\udce9': character 3 is no Unicode text"),
        ("a", {"bad_words": ["caf\udce9"]}, "character 3 is no Unicode text"),
    ],
)
def test_prompts_that_cannot_run_are_refused(demo_llm, prompt, params, words):
    llm = demo_llm("demo/eagle3", 3)
    with pytest.raises(ValueError, match=words):
        llm.generate([[0, 5], prompt], SamplingParams(temperature=0.0, **params), use_tqdm=False)
    assert not llm.engine.scheduler.has_unfinished


@pytest.mark.parametrize(
    "args, words",
    [
        ((None,), "prompts=None: give text, a list of token ids, or a list of these"),
        ((b"ab",), "prompts=b'ab': give text, a list"),
        (
            ("a", {"temperature": 0}),
            "sampling_params={'temperature': 0}: give SamplingParams, or a list",
        ),
        (("a", [{"temperature": 0}]), "sampling_params={'temperature': 0}: give SamplingParams"),
        (("a", None, False, 1), "priority=1: give a list of 1 integers, one for each prompt"),
    ],
)
def test_invalid_prompts_and_parameters_are_refused_by_name(demo_llm, args, words):
    llm = demo_llm("demo/eagle3", 3)
    with pytest.raises(ValueError, match=words):
        llm.generate(*args)
    assert not llm.engine.has_unfinished


def test_a_cache_too_small_for_a_request_is_refused_before_anything_runs(demo_llm, greedy):
    llm = demo_llm("demo/eagle3", 3, num_kv_blocks=2)
    with pytest.raises(
        ValueError, match=r"need 4 blocks of 64 tokens, num_kv_blocks=2: raise num_kv_blocks"
    ):
        llm.generate([[0] * 10, [0] * 100], [greedy(5), greedy(120)], use_tqdm=False)
    assert not llm.engine.scheduler.has_unfinished


def test_requests_wait_for_rows_and_blocks(demo_llm, greedy, prompts, references):
    llm = demo_llm("demo/eagle3", 3, max_num_seqs=2, num_kv_blocks=8)
    outputs = llm.generate(prompts[:5], greedy(12), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [r[:12] for r in references[:5]]
    assert llm.engine.scheduler.pool.num_free == 8


def test_one_params_for_each_prompt_or_one_for_all(demo_llm, greedy, prompts):
    llm = demo_llm("demo/eagle3", 3)
    outputs = llm.generate(prompts[:2], [greedy(3), greedy(5)], use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 5]
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        llm.generate(prompts[:2], [greedy(3)], use_tqdm=False)


@pytest.mark.parametrize(
    "values", [{"top_k": 1 << 80}, {"min_tokens": 1 << 80, "max_tokens": 1 << 80}]
)
def test_counts_beyond_what_there_is_are_as_good_as_all(demo_llm, values):
    llm = demo_llm("demo/eagle3", 3, max_model_len=32)
    [expected] = llm.generate(
        [5, 6, 7], SamplingParams(seed=4, max_tokens=29, min_tokens=29), use_tqdm=False
    )
    params = SamplingParams(**{"seed": 4, "max_tokens": 29, "min_tokens": 29, **values})
    [output] = llm.generate([5, 6, 7], params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    "args, words",
    [
        ((torch.tensor(5),), "prompts=tensor.5.: give text, a list"),
        ((np.array(5),), "prompts=array.5.: give text, a list"),
        (({"text": "a"},), "a prompt does not take text"),
        (({1, 2},), "prompts={1, 2}: give text, a list"),
        ((memoryview(b"ab"),), "prompts=<memory"),
        (([True, False],), r"prompts\[0\] is True: give text or a list"),
        (([[True]],), r"prompt=\[True\]: give text or a list"),
        (([[2**70]],), "token id 1180591620717411303424 is outside"),
        (("a", ""), "sampling_params='': give SamplingParams, or a list"),
        (("a", torch.tensor(1)), "sampling_params=tensor.1.: give SamplingParams, or a list"),
        (("a", [None]), "sampling_params=None: give SamplingParams"),
        (("a", 0), "sampling_params=0: give SamplingParams"),
        (("a", None, "no"), "use_tqdm='no': give True or False"),
        (("a", None, torch.tensor([1, 2])), "use_tqdm=tensor.*: give True or False"),
        (("a", None, False, [True]), r"priority=\[True\]: give a list"),
        (("a", None, False, b"a"), "priority=b'a': give a list"),
        (("a", None, False, {5: 0}), "priority={5: 0}: give a list"),
        (("a", None, False, torch.tensor(1)), "priority=tensor.1.: give a list"),
        (("a", None, False, [1.5]), r"priority=\[1.5\]: give a list"),
    ],
)
def test_odd_values_are_refused_by_name(demo_llm, args, words):
    llm = demo_llm("demo/eagle3", 3)
    with pytest.raises(ValueError, match=words):
        llm.generate(*args)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("params", [0, "", [], {}, torch.tensor([1, 2]), [SamplingParams()]])
def test_a_stream_takes_sampling_params_and_nothing_else(demo_llm, params):
    llm = demo_llm("demo/eagle3", 3)
    with pytest.raises(ValueError, match=r"sampling_params=.*: give SamplingParams"):
        llm.stream("a", params)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    "prompt", [None, 5, {1}, iter([1]), torch.tensor(1), np.array([0.5]), [[1]], object()]
)
def test_a_stream_refuses_invalid_prompts(demo_llm, prompt):
    with pytest.raises(ValueError, match=r"prompt=.*: give text or a list of token ids"):
        demo_llm("demo/eagle3", 3).stream(prompt)


@pytest.mark.parametrize("outputs", ["x", 5, None, ["x"], {"a": 1}, torch.tensor(1), [None]])
def test_run_stats_takes_outputs_and_nothing_else(demo_llm, outputs):
    with pytest.raises(ValueError, match=r"outputs=.*: give a list of RequestOutput"):
        demo_llm("demo/eagle3", 3).run_stats(outputs)


CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "messages, options, words",
    [
        ("a", {}, "messages='a': give a list of messages"),
        (None, {}, "messages=None: give a list"),
        ({}, {}, "messages={}: give a list"),
        (torch.tensor([1]), {}, "messages=tensor.*: give a list"),
        ([1], {}, r"messages\[0\] is 1: give"),
        ([{"role": "user", "content": 5}], {}, r"messages\[0\] is .*: give"),
        ([{"role": "\udce9", "content": "a"}], {}, "no Unicode text"),
        (CHAT, {"chat_template": 5}, "chat_template=5: give Jinja text"),
        (CHAT, {"chat_template": torch.tensor([1, 2])}, "chat_template=tensor.*: give Jinja text"),
        (CHAT, {"add_generation_prompt": "no"}, "add_generation_prompt='no': give True or False"),
        (CHAT, {"add_generation_prompt": 1}, "add_generation_prompt=1: give True or False"),
        (CHAT, {"sampling_params": 0}, "sampling_params=0: give SamplingParams"),
    ],
)
def test_a_chat_refuses_odd_values_by_name(demo_llm, messages, options, words):
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match=words):
        demo_llm("demo/eagle3", 3).chat(messages, **{"chat_template": template} | options)


@pytest.mark.parametrize(
    "name", ["a\0b", "~no-such-user/x", "x" * 5000, "a b/c d", "\udce9/x", b"demo", 5, True]
)
def test_names_that_no_model_can_have_are_refused(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"target .*: (give|no such) "):
        LLM(name)
