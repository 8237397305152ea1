"""A script written for vLLM's offline API runs, unchanged but for its import."""

import asyncio
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch

from specdec import LLM, AsyncLLM, SamplingParams
from specdec.requests.metrics import Counter, Vector
from specdec.requests.params import recommended_params

SCRIPT = """
import numpy as np

from vllm import LLM, SamplingParams


def main():
    prompts = [{"prompt": "def fibonacci(n):"}, {"prompt": "import os"}]
    sampling_params = SamplingParams(
        n=2, temperature=0.8, top_p=0.95, seed=7, max_tokens=16, logprobs=2
    )
    speculative_config = {
        "method": "eagle3",
        "model": "demo",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 1,
    }
    with LLM(
        model="demo",
        speculative_config=speculative_config,
        tokenizer="demo",
        revision="main",
        trust_remote_code=False,
        tensor_parallel_size=1,
        gpu_memory_utilization=None,
        max_num_seqs=np.int64(8),
        max_model_len=256,
        enable_chunked_prefill=True,
        disable_log_stats=False,
    ) as llm:
        tokenizer = llm.get_tokenizer()
        outputs = llm.generate(prompts, sampling_params)
        for output in outputs:
            print(output.prompt, len(output.outputs), output.num_cached_tokens)
            assert output.metrics.first_token_latency > 0
            for sample in output.outputs:
                assert len(sample.logprobs) == len(sample.token_ids) == 16
                assert sample.logprobs[0][sample.token_ids[0]].rank >= 1
        ids = np.array(tokenizer.encode("def f("))
        greedy = SamplingParams(temperature=0, max_tokens=8)
        from_ids = llm.generate({"prompt_token_ids": ids}, greedy, use_tqdm=False)
        from_text = llm.generate("def f(", greedy, use_tqdm=False)
        assert from_ids[0].outputs[0].text == from_text[0].outputs[0].text
        content = [{"type": "text", "text": "def add(a, b):"}]
        messages = [{"role": "user", "content": content}]
        answer = llm.chat(messages, greedy, chat_template_kwargs={"enable_thinking": False})
        print(repr(answer[0].outputs[0].text))
        print(len(llm.get_metrics()))


if __name__ == "__main__":
    main()
"""


BEGINNING = "def fibonacci(n): 2 0\nimport os 2 0\n"


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "offline.py"
    file.write_text(SCRIPT.replace("from vllm import", "from specdec import"))
    return file


def test_an_offline_script_runs_unchanged_but_for_its_import(script, capsys):
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.startswith(BEGINNING)


@pytest.mark.slow
def test_an_offline_script_runs_as_a_process(script):
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(BEGINNING)


def forms(ids):
    """Everything that may stand for one prompt of these ids."""
    return [
        ids,
        tuple(ids),
        np.array(ids),
        torch.tensor(ids),
        {"prompt_token_ids": ids},
        {"prompt_token_ids": np.array(ids, dtype=np.int32)},
        {"prompt": "any", "prompt_token_ids": torch.tensor(ids)},
    ]


def test_every_form_of_a_prompt_means_the_same(demo_llm, greedy, prompts):
    llm = demo_llm("demo/eagle3", 3)
    ids = prompts[2]
    expected = llm.generate([ids], greedy(6), use_tqdm=False)[0].outputs
    for form in forms(ids):
        assert llm.generate(form, greedy(6), use_tqdm=False)[0].outputs == expected
        assert "".join(piece.text for piece in llm.stream(form, greedy(6))) == expected[0].text
    together = llm.generate(forms(ids), greedy(6), use_tqdm=False)
    assert [output.outputs for output in together] == [expected] * len(forms(ids))
    rows = llm.generate(np.array([ids, ids]), greedy(6), use_tqdm=False)
    assert [output.outputs for output in rows] == [expected] * 2
    assert llm.generate({"prompt": "def f("}, greedy(2), use_tqdm=False)[0].prompt == "def f("


def test_asyncio_takes_the_same_forms(prompts, greedy):
    async def run():
        async with AsyncLLM("demo", max_num_seqs=8, max_model_len=512, device="cpu") as llm:
            texts = set()
            for form in forms(prompts[0]):
                async for output in llm.generate(form, greedy(4)):
                    text = output.outputs[0].text
                texts.add(text)
            metrics = await llm.get_metrics()
        return texts, metrics

    texts, metrics = asyncio.run(run())
    assert len(texts) == 1
    assert value(metrics, "generation_tokens") == 4 * len(forms(prompts[0]))


@pytest.mark.parametrize(
    "prompt, words",
    [
        ({}, 'give {"prompt": text} or'),
        ({"prompt": 3}, 'give {"prompt": text} or'),
        ({"text": "a"}, "a prompt does not take text"),
        ({"prompt": "a", "multi_modal_data": {}}, "a prompt does not take multi_modal_data"),
        ({"prompt_token_ids": [1.5]}, "give text or a list of token ids"),
        (np.array([1.5]), "prompts.0. is 1.5"),
        (np.array([[True]]), "give text or a list of token ids"),
    ],
)
def test_what_is_no_prompt_is_refused(demo_llm, prompt, words):
    llm = demo_llm("demo/eagle3", 3)
    with pytest.raises(ValueError, match=words):
        llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)
    assert not llm.engine.has_unfinished


def test_no_limit_means_the_end_of_the_context(demo_llm):
    llm = demo_llm("demo/eagle3", 3, max_model_len=64)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    output = llm.generate([[0] * 10], params, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 54
    assert output.outputs[0].finish_reason == "length"


def test_logprobs_of_the_whole_vocabulary(demo_llm):
    llm = demo_llm("demo/eagle3", 3)
    every = SamplingParams(temperature=0.0, max_tokens=4, logprobs=-1, prompt_logprobs=-1)
    few = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    outputs = llm.generate([[5, 6, 7]] * 2, [every, few], use_tqdm=False)
    whole, best = (output.outputs[0].logprobs for output in outputs)
    assert [len(row) for row in whole] == [4096] * 4
    assert all(row.items() >= two.items() for row, two in zip(whole, best, strict=True))
    assert [len(row) for row in outputs[0].prompt_logprobs[1:]] == [4096] * 2
    assert sorted(each.rank for each in whole[0].values())[:3] == [1, 2, 3]


def test_without_detokenisation_the_text_is_empty_and_the_tokens_are_the_same(demo_llm, greedy):
    llm = demo_llm("demo/eagle3", 3)
    plain, bare = llm.generate(
        [[5, 6]] * 2, [greedy(6), greedy(6, detokenize=False)], use_tqdm=False
    )
    assert bare.outputs[0].text == ""
    assert bare.outputs[0].token_ids == plain.outputs[0].token_ids
    pieces = list(llm.stream([5, 6], greedy(6, detokenize=False)))
    assert [piece.text for piece in pieces] == [""] * len(pieces)
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == plain.outputs[0].token_ids


def test_a_request_keeps_the_parameters_it_was_given(demo_llm):
    llm = demo_llm("demo/eagle3", 3)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    stream = llm.stream([5, 6], params)
    params.max_tokens = 2
    assert sum(len(piece.token_ids) for piece in stream) == 6
    params.max_tokens = 0
    with pytest.raises(ValueError, match="max_tokens=0"):
        llm.generate([5, 6], params, use_tqdm=False)


def value(metrics, name):
    [found] = [each for each in metrics if each.name == f"specdec:{name}"]
    return found.values if isinstance(found, Vector) else found.value


def test_metrics_count_what_was_done_and_a_shutdown_ends_everything():
    with LLM("demo", {"model": "demo"}, max_num_seqs=4, max_model_len=128, device="cpu") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
        metrics = llm.get_metrics()
        stats = LLM.run_stats(outputs)
        assert stats.mean_acceptance_length > 1.3  # the draft is alive
        stream = llm.stream([5, 6], params)
        next(stream)
        assert value(llm.get_metrics(), "num_requests_running") == 1
    assert value(metrics, "prompt_tokens") == 5
    assert value(metrics, "generation_tokens") == 24
    assert value(metrics, "spec_decode_num_drafts") == stats.num_rounds
    assert value(metrics, "spec_decode_num_draft_tokens") == stats.num_drafted_tokens
    assert value(metrics, "spec_decode_num_accepted_tokens") == stats.num_accepted_tokens
    # K = 3: four rows a round; both prompts in one step, then rounds until the slower one ends
    assert value(metrics, "rows_verified") == 4 * stats.num_rounds
    num_rounds = max(output.stats.num_rounds for output in outputs)
    assert value(metrics, "levels_drafted") == 3 * (1 + num_rounds)
    accepted = value(metrics, "spec_decode_num_accepted_tokens_per_pos")
    assert accepted == stats.num_accepted_per_position
    assert (
        Counter(name="specdec:request_success", labels={"finished_reason": "length"}, value=2)
        in metrics
    )
    assert [piece.finish_reason for piece in stream][-1] == "abort"
    with pytest.raises(RuntimeError, match="was shut down"):
        llm.generate("a")
    llm.shutdown()  # has no effect twice
    assert outputs[0].outputs[0].token_ids


def test_metrics_move_with_each_step_of_a_request():
    with LLM("demo", {"model": "demo"}, max_num_seqs=4, max_model_len=128, device="cpu") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        num_tokens = 0
        for num_rounds, piece in enumerate(llm.stream([5, 6, 7], params)):
            num_tokens += len(piece.token_ids)
            metrics = llm.get_metrics()
            assert value(metrics, "prompt_tokens") == 3
            assert value(metrics, "generation_tokens") == num_tokens
            assert value(metrics, "spec_decode_num_drafts") == num_rounds
            assert value(metrics, "rows_verified") == 4 * num_rounds
            assert value(metrics, "levels_drafted") == 3 * (1 + num_rounds)
        assert (num_tokens, num_rounds > 4) == (30, True)


def test_the_sampling_that_a_checkpoint_recommends(demo_llm, tmp_path):
    assert demo_llm("demo/eagle3", 3).get_default_sampling_params() == SamplingParams()
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "eos_token_id": 1}')
    assert recommended_params(tmp_path) == SamplingParams(temperature=0.6, top_k=20, max_tokens=9)
    file.write_text('{"temperature": "warm"}')
    with pytest.raises(ValueError, match=r"generation_config.json: temperature='warm'"):
        recommended_params(tmp_path)


def test_a_chat_tells_the_text_of_its_prompt(demo_llm, greedy):
    messages = [{"role": "user", "content": "def f("}]
    output = demo_llm("demo/eagle3", 3).chat(messages, greedy(2), use_tqdm=False)[0]
    assert output.prompt == "<|bos|>def f(\n"
