"""Sampling by the whole engine: a seed gives the same text, and every parameter has its effect."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec import LLM, SamplingParams
from tests.reference import Reference
from weights.demo import demo_directory

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def prompts(prompts):
    """Without the first, which is long."""
    return prompts[1:]


@pytest.fixture(scope="module")
def references(references):
    """Of these prompts."""
    return references[1:]


def mixed(index, length=NUM_TOKENS):
    """Parameters of request `index`: greedy ones among sampled, limited and penalised ones."""
    kinds = [
        {},
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.05, "temperature": 1.5},
        {"temperature": 0.0},
        {"repetition_penalty": 1.3, "top_p": 0.95},
        {"frequency_penalty": 0.8, "presence_penalty": 0.4},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"logit_bias": {200: -3.0, 13: 2.0}, "temperature": 1.3},
        {"bad_words": [" self", "import"], "top_k": 50},
        {"logprobs": 2, "temperature": 0.4},
        {"min_tokens": length, "stop_token_ids": [200], "temperature": 0.8},
    ]
    values = {"temperature": 1.0, "seed": index, "max_tokens": length, "ignore_eos": True}
    return SamplingParams(**values | kinds[index % len(kinds)])


def sampled(llm, prompts, count, order=None, batch=None):
    """Tokens of `count` mixed requests, run in this order and in batches."""
    order = list(order or range(count))
    found = {}
    for start in range(0, count, batch or count):
        ids = order[start : start + (batch or count)]
        outputs = llm.generate(
            [prompts[i % 47] for i in ids], [mixed(i) for i in ids], use_tqdm=False
        )
        found |= {i: output.outputs[0].token_ids for i, output in zip(ids, outputs, strict=True)}
    return [found[i] for i in range(count)]


@pytest.fixture(scope="module")
def plain(demo_llm, prompts):
    return sampled(demo_llm(None), prompts, 12)  # one of each kind


@pytest.mark.parametrize(
    "draft, k",
    [
        ("demo/eagle3", 5),
        pytest.param("demo/eagle1", 3, marks=pytest.mark.slow),
        pytest.param("demo/eagle3", 1, marks=pytest.mark.slow),
    ],
)
def test_the_same_seeds_give_the_same_tokens_for_every_k(demo_llm, prompts, plain, draft, k):
    assert sampled(demo_llm(draft, k), prompts, 12) == plain


def test_batches_and_order_change_nothing(demo_llm, prompts, plain):
    order = random.Random(0).sample(range(12), 12)
    assert sampled(demo_llm("demo/eagle3", 3), prompts, 12, order, batch=5) == plain
    assert sampled(demo_llm("demo/eagle3", 3), prompts, 3, batch=1) == plain[:3]


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_two_hundred_requests_for_every_k_batch_and_order(demo_llm, prompts, k):
    expected = sampled(demo_llm(None), prompts, 200)
    llm = demo_llm("demo/eagle3", k)
    assert sampled(llm, prompts, 200, batch=1) == expected
    assert (
        sampled(llm, prompts, 200, random.Random(k).sample(range(200), 200), batch=16) == expected
    )


def test_greedy_rows_keep_their_tokens_beside_sampled_ones(demo_llm, prompts, references, greedy):
    params = [greedy(24), SamplingParams(seed=1, max_tokens=24, logprobs=3), greedy(24, logprobs=0)]
    outputs = demo_llm("demo/eagle3", 3).generate(
        [prompts[0], prompts[1], prompts[2]], params, use_tqdm=False
    )
    assert outputs[0].outputs[0].token_ids == references[0][:24]
    assert outputs[2].outputs[0].token_ids == references[2][:24]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_pq_rules_keep_greedy_rows_exact_beside_sampled_ones(prompts, references, greedy, rule):
    speculation = {"model": "demo", "num_speculative_tokens": 3, "acceptance": rule}
    llm = LLM("demo", speculation, max_num_seqs=4, max_model_len=256, device="cpu")
    params = [greedy(24), SamplingParams(seed=1, max_tokens=24, top_p=0.9), greedy(24)]
    outputs = llm.generate([prompts[0], prompts[1], prompts[2]], params, use_tqdm=False)
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [references[i][:24] for i in (0, 2)]
    assert llm.run_stats(outputs).mean_acceptance_length > 1.4


def test_seed_none_reports_a_seed_that_reproduces_and_n_counts_from_it(demo_llm, prompts):
    llm = demo_llm("demo/eagle3", 3)
    [first] = llm.generate([prompts[2]], SamplingParams(max_tokens=12, n=3), use_tqdm=False)
    again = [SamplingParams(max_tokens=12, seed=(first.seed + i) % 2**64) for i in range(3)]
    alone = llm.generate([prompts[2]] * 3, again, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in alone] == [sample.token_ids for sample in first.outputs]
    assert [sample.index for sample in first.outputs] == [0, 1, 2]
    assert first.finished


def test_the_seed_after_the_greatest_is_zero(demo_llm, prompts):
    llm = demo_llm("demo/eagle3", 3)
    most = 2**64 - 1
    params = [SamplingParams(max_tokens=8, seed=most, n=2), SamplingParams(max_tokens=8, seed=0)]
    both, zero = llm.generate([prompts[1]] * 2, params, use_tqdm=False)
    assert both.outputs[1].token_ids == zero.outputs[0].token_ids != both.outputs[0].token_ids


def test_negative_seeds_count_from_the_end_and_minus_one_draws(demo_llm, prompts):
    params = [
        SamplingParams(max_tokens=12, seed=seed) for seed in (-5, 2**64 - 5, 2**65 - 5, -1, -1)
    ]
    found = demo_llm("demo/eagle3", 3).generate([prompts[2]] * 5, params, use_tqdm=False)
    assert [each.seed for each in found[:3]] == [2**64 - 5] * 3
    assert len({tuple(each.outputs[0].token_ids) for each in found[:3]}) == 1
    assert found[3].seed != found[4].seed
    assert {found[3].seed, found[4].seed}.isdisjoint({-1, 2**64 - 1})


def test_an_engines_seed_decides_the_drawn_ones(prompts):
    runs = []
    for seed in (4, 4, 5):
        llm = LLM("demo", max_num_seqs=1, max_model_len=256, device="cpu", seed=seed)
        runs.append(
            llm.generate([prompts[2]], SamplingParams(max_tokens=4), use_tqdm=False)[0].seed
        )
    assert runs[0] == runs[1] != runs[2]


CHANGES = [
    {"top_p": 0.5},
    {"top_k": 2},
    {"min_p": 0.5},
    {"temperature": 0.3},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 2.0},
    {"allowed_token_ids": list(range(100, 400))},
    {"seed": 12},
]


@pytest.fixture(scope="module")
def changed(demo_llm, prompts):
    """Tokens with each of CHANGES, and without, in one batch."""
    base = {"temperature": 1.2, "seed": 11, "max_tokens": 24, "ignore_eos": True}
    params = [SamplingParams(**base | values) for values in (*CHANGES, {})]
    llm = demo_llm("demo/eagle3", 3)
    outputs = llm.generate([prompts[1]] * len(params), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("index", range(len(CHANGES)), ids=[next(iter(each)) for each in CHANGES])
def test_every_parameter_changes_the_output(changed, index):
    assert changed[index] != changed[-1]
    assert set(changed[index]) <= set(CHANGES[index].get("allowed_token_ids", range(4096)))


def test_bias_and_bad_words_keep_words_out(demo_llm, prompts, greedy, references):
    llm = demo_llm("demo/eagle3", 3)
    word = llm.tokenizer.decode(references[0][3:5])
    token = references[0][2]
    outputs = llm.generate(
        [prompts[0]] * 2,
        [greedy(24, bad_words=[word]), greedy(24, logit_bias={token: -100.0})],
        use_tqdm=False,
    )
    assert word in llm.tokenizer.decode(references[0][:24])
    assert references[0][3:5] not in [outputs[0].outputs[0].token_ids[i : i + 2] for i in range(23)]
    assert token not in outputs[1].outputs[0].token_ids


def test_a_bad_word_that_begins_in_the_prompt_may_be_completed(
    demo_llm, prompts, greedy, references
):
    llm = demo_llm("demo/eagle3", 3)
    index = 3
    ids = [prompts[index][-1], references[index][0]]
    word = llm.tokenizer.decode(ids)
    assert llm.engine.intake.tokenizer.encode_word(word) == ids
    [output] = llm.generate([prompts[index]], greedy(2, bad_words=[word]), use_tqdm=False)
    assert output.outputs[0].token_ids[0] == ids[1]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_without_a_token_left_the_request_ends_naming_the_parameters(
    demo_llm, prompts, greedy, logprobs
):
    llm = demo_llm("demo/eagle3", 3)
    params = [
        greedy(8, allowed_token_ids=[7, 8], stop_token_ids=[7, 8], min_tokens=3, logprobs=logprobs),
        greedy(8),
    ]
    broken, sound = llm.generate(prompts[:2], params, use_tqdm=False)
    completion = broken.outputs[0]
    assert (completion.finish_reason, completion.token_ids) == ("error", [])
    assert "allowed_token_ids, min_tokens" in completion.stop_reason
    assert completion.logprobs == (None if logprobs is None else [])
    assert sound.outputs[0].finish_reason == "length"


def test_a_draft_of_the_round_flips_decisions_after_it(demo_llm, prompts):
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, max_tokens=32, ignore_eos=True)
    reference = Reference(demo_directory("target"))
    flipped = 0
    for output in demo_llm("demo/eagle3", 5).generate(prompts[:8], params, use_tqdm=False):
        tokens = output.outputs[0].token_ids
        num_prompt = len(output.prompt_token_ids)
        after = (
            reference.forward([*output.prompt_token_ids, *tokens])
            .logits_TV.double()
            .numpy()[num_prompt - 1 :]
        )
        start = 1
        for record in output.stats.rounds:
            end = min(start + record.num_accepted + 1, len(tokens))
            for i in range(start, end):  # row i decides token i
                before_round, before_row = (
                    np.bincount(tokens[:n], minlength=after.shape[1]) for n in (start, i)
                )
                assert np.argmax(after[i] - 2 * before_row) == tokens[i]
                flipped += np.argmax(after[i] - 2 * before_round) != tokens[i]
            start = end
        assert start == len(tokens)
    assert flipped > 0


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"seed": 5, "top_p": 0.9, "repetition_penalty": 1.2}]
)
def test_logprobs_are_those_of_transformers(demo_llm, prompts, params):
    model = AutoModelForCausalLM.from_pretrained(
        demo_directory("target"), dtype=torch.float32
    ).eval()
    params = SamplingParams(max_tokens=24, logprobs=3, ignore_eos=True, **params)
    outputs = demo_llm("demo/eagle3", 3).generate(prompts[:3], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=False):
        completion = output.outputs[0]
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[
                0, len(prompt) - 1 : -1
            ]
        truth = logits.log_softmax(dim=-1)
        assert len(completion.logprobs) == len(completion.token_ids) == 24
        for row_V, token, found in zip(
            truth, completion.token_ids, completion.logprobs, strict=True
        ):
            assert abs(found[token].logprob - row_V[token]) < 1e-4
            assert all(abs(entry.logprob - row_V[other]) < 1e-4 for other, entry in found.items())
            assert next(iter(found.values())).logprob == found[token].logprob


@pytest.mark.parametrize("k", [0, 3])
def test_logprobs_are_those_of_the_reference_before_processors(demo_llm, prompts, k):
    params = SamplingParams(
        seed=3, max_tokens=12, logprobs=4, prompt_logprobs=2, top_k=5, ignore_eos=True
    )
    [output] = demo_llm("demo/eagle3", k, max_num_batched_tokens=48).generate(
        [prompts[5]], params, use_tqdm=False
    )
    tokens = [*prompts[5], *output.outputs[0].token_ids]
    completion = output.outputs[0]
    logits = Reference(demo_directory("target")).forward(tokens).logits_TV
    truth = logits.double().log_softmax(-1).numpy()
    assert (len(completion.logprobs), len(output.prompt_logprobs)) == (12, len(prompts[5]))
    assert output.prompt_logprobs[0] is None
    rows = [*output.prompt_logprobs[1:], *completion.logprobs]
    for t, (row, token) in enumerate(zip(rows, tokens[1:], strict=True)):
        order = np.argsort(-truth[t])
        assert token in row
        assert next(iter(row)) == token
        num_top = 2 if t < len(prompts[5]) - 1 else 4
        assert set(order[:num_top]) | {token} == set(row)
        for found, entry in row.items():
            assert abs(entry.logprob - truth[t, found]) < 1e-4
            assert order[entry.rank - 1] == found
    assert completion.cumulative_logprob == pytest.approx(
        sum(truth[-13 + i, t] for i, t in enumerate(tokens[-12:])), abs=1e-3
    )


@pytest.mark.parametrize(
    "values, words",
    [
        ({"logit_bias": {4096: 1.0}}, "logit_bias: token id 4096 is outside"),
        ({"allowed_token_ids": [5, 9999]}, "allowed_token_ids: token id 9999"),
        ({"bad_words": ["a b c d e f g h i j k l m n o p q r s t u v w x y z" * 3]}, "bad_words"),
    ],
)
def test_ids_outside_the_vocabulary_and_words_too_long_are_refused_by_name(
    demo_llm, prompts, values, words
):
    llm = demo_llm("demo/eagle3", 3)
    with pytest.raises(ValueError, match=words):
        llm.generate([prompts[0]], SamplingParams(**values), use_tqdm=False)
    assert not llm.engine.scheduler.has_unfinished
