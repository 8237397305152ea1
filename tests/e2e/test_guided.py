"""Guided texts: they follow their grammars, and drafts, batches and preemption change none."""

import itertools
import json
import re
from functools import cache

import jsonschema
import pytest

from specdec import LLM, SamplingParams, StructuredOutputsParams
from specdec.guided import step_masks
from tests.e2e.guided_cases import CASES, GRAMMARS, SCHEMAS
from tests.specdec.guided.hostile import ROWS

PROMPT = "Question: give one value as JSON.\nAnswer: "
ENOUGH = 25  # schemas of 30 whose texts must come to an end
SIZES = {"max_num_seqs": 24, "max_model_len": 640, "max_num_batched_tokens": 512}
EOS = 1


def guided(case, temperature=0.0, seed=0, max_tokens=48, **values):
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        structured_outputs=case,
        **values,
    )


def generate(llm, params, prompts=PROMPT):
    prompts = [prompts] * len(params) if isinstance(prompts, str) else prompts
    return llm.generate(prompts, params, use_tqdm=False)


def tokens_of(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def is_accepted(llm, case, sample):
    """Whether the tokens are a prefix of some text; a whole one, where the sample has stopped."""
    guide = llm.engine.intake.guide(SamplingParams(structured_outputs=case))
    for token in sample.token_ids:
        [mask] = guide.masks(())
        if not mask[token // 8] >> token % 8 & 1:
            return False
        guide.advance([token])
    return guide.is_complete or sample.finish_reason == "length"


def check_texts(llm, outputs, cases=CASES):
    """Of these cases, in order; the number of schemas whose text has come to an end."""
    num_stopped = 0
    for case, output in zip(cases, outputs, strict=True):
        [sample] = output.outputs
        assert sample.finish_reason in ("stop", "length")
        assert is_accepted(llm, case, sample), sample.text
        if sample.finish_reason == "length":
            continue
        assert sample.token_ids[-1] == EOS
        if "json" in case:
            value = json.loads(sample.text)
            jsonschema.validate(value, case["json"], cls=jsonschema.Draft202012Validator)
            num_stopped += 1
        elif "regex" in case:
            assert re.fullmatch(case["regex"], sample.text)
        elif "choice" in case:
            assert sample.text in case["choice"]
    return num_stopped


@pytest.mark.parametrize(
    "temperatures, every, max_tokens",
    [
        ((0.0, 1.0), 2, 96),  # in turns
        pytest.param((0.0, 1.0), 1, 192, marks=pytest.mark.slow),
        pytest.param((0.0,), 1, 192, marks=pytest.mark.slow),
        pytest.param((1.0,), 1, 192, marks=pytest.mark.slow),
    ],
)
def test_texts_follow_their_grammars_and_most_come_to_an_end(
    demo_llm, temperatures, every, max_tokens
):
    llm = demo_llm("demo/eagle3", 4, **SIZES)
    assert len(SCHEMAS) == 30
    cases = CASES[::every]
    outputs = generate(
        llm,
        [
            guided(case, temperatures[seed % len(temperatures)], seed, max_tokens)
            for seed, case in enumerate(cases)
        ],
    )
    num_schemas = sum("json" in case for case in cases)
    assert check_texts(llm, outputs, cases) >= ENOUGH / len(SCHEMAS) * num_schemas
    assert llm.run_stats(outputs).mean_acceptance_length > 1.4


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", [0, 100])
def test_texts_of_512_tokens(demo_llm, temperature, seed):
    llm = demo_llm("demo/eagle3", 4, **SIZES)
    params = [guided(case, temperature, seed + i, 512) for i, case in enumerate(CASES)]
    assert check_texts(llm, generate(llm, params)) >= ENOUGH


@pytest.fixture(scope="module")
def mixed():
    """Guided and other requests in turns: (prompt, parameters) each."""
    others = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 2},
    ]
    more = [
        {},
        {"repetition_penalty": 1.3, "logprobs": 2},
        {"bad_words": ["name", "true"], "top_k": 30},
        {"num_speculative_tokens": 1, "min_p": 0.02},
        {"speculate": False},
        {"min_tokens": 6, "frequency_penalty": 0.5},
    ]
    found = []
    for i, case in enumerate(CASES[::2]):
        found.append(
            (PROMPT * (1 + i % 4), guided(case, float(i % 2), i, 24, **more[i % len(more)]))
        )
        plain = {"seed": i, "max_tokens": 16, "ignore_eos": True, **others[i % len(others)]}
        found.append((f"def f{i}(x):\n" * (1 + i % 5), SamplingParams(**plain)))
    return found


def run(llm, requests):
    prompts, params = zip(*requests, strict=True)
    return tokens_of(generate(llm, list(params), list(prompts)))


@pytest.fixture(scope="module")
def plain(demo_llm, mixed):
    """plain(count): tokens of the first without drafts; the guided ones alone, the others alone."""
    llm = demo_llm(None, 0, **SIZES)

    @cache
    def tokens(count=None):
        without = [(prompt, params.clone()) for prompt, params in mixed[:count]]
        for _, params in without:
            params.num_speculative_tokens = None
        found = [run(llm, without[i::2]) for i in range(2)]
        return list(itertools.chain.from_iterable(zip(*found, strict=True)))

    return tokens


COUNTS = [16, pytest.param(None, marks=pytest.mark.slow)]  # 16: each kind of parameters once


@pytest.mark.parametrize("count", COUNTS)
def test_drafts_and_other_requests_change_no_token(demo_llm, mixed, plain, count):
    llm = demo_llm("demo/eagle3", 4, **SIZES)
    assert run(llm, mixed[:count]) == plain(count)


@pytest.mark.parametrize(
    "draft, top_k, num_nodes, count",
    [
        ("eagle3", 4, 11, 8),
        pytest.param("eagle1", 4, 15, None, marks=pytest.mark.slow),
        pytest.param("eagle3", 8, 31, None, marks=pytest.mark.slow),
    ],
)
def test_grammars_follow_every_branch_of_a_tree(mixed, plain, draft, top_k, num_nodes, count):
    tree = {"num_speculative_tokens": 5, "top_k": top_k, "num_draft_tokens": num_nodes}
    tree["adaptive"] = False
    llm = LLM("demo", {"model": f"demo/{draft}", **tree}, device="cpu", **SIZES)
    outputs = generate(llm, [p for _, p in mixed[:count]], [prompt for prompt, _ in mixed[:count]])
    assert tokens_of(outputs) == plain(16 if count else None)[:count]
    assert llm.run_stats(outputs[::2]).mean_acceptance_length > 1.4


def small(num_kv_blocks, is_async=True):
    """An engine without room, with prompts in parts."""
    return LLM(
        "demo",
        {"model": "demo", "num_speculative_tokens": 3},
        max_num_seqs=8,
        max_model_len=256,
        num_kv_blocks=num_kv_blocks,
        max_num_batched_tokens=48,
        async_scheduling=is_async,
        device="cpu",
    )


@pytest.mark.parametrize(
    "count, is_async",
    [
        (16, True),
        pytest.param(None, True, marks=pytest.mark.slow),
        pytest.param(None, False, marks=pytest.mark.slow),
    ],
)
def test_running_ahead_and_prompts_in_parts_change_no_token(mixed, plain, count, is_async):
    llm = small(10, is_async)
    assert run(llm, mixed[:count]) == plain(count)
    assert llm.engine.scheduler.pool.num_free == 10


@pytest.mark.slow
def test_preemption_changes_no_token():
    free = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    cases = [{"json": SCHEMAS[name]} for name in ("linked list", "tree", "number with bounds")]
    params = [free, *(guided(case, float(i == 1), 3 + i, 60) for i, case in enumerate(cases))]
    roomy, tight = (generate(small(num_blocks), params, PROMPT * 2) for num_blocks in (24, 5))
    assert tokens_of(tight) == tokens_of(roomy)
    assert sum(output.stats.num_preemptions for output in tight[1:]) > 0
    assert sum(output.stats.num_preemptions for output in roomy) == 0


@pytest.mark.slow
@pytest.mark.parametrize("draft, k", [("demo/eagle3", 1), ("demo/eagle3", 5), ("demo/eagle1", 3)])
@pytest.mark.parametrize("batch", [1, 5])
def test_the_tokens_are_the_same_for_every_k_and_batch(demo_llm, mixed, plain, draft, k, batch):
    llm = demo_llm(draft, k, **SIZES)
    found = [run(llm, mixed[i : i + batch]) for i in range(0, len(mixed), batch)]
    assert list(itertools.chain.from_iterable(found)) == plain()


@pytest.mark.slow
@pytest.mark.parametrize("rule", [pytest.param("rejection", marks=pytest.mark.slow), "block"])
def test_under_pq_texts_follow_their_grammars_and_greedy_ones_are_exact(demo_llm, rule):
    speculation = {"model": "demo", "num_speculative_tokens": 3, "acceptance": rule}
    llm = LLM("demo", speculation, max_num_seqs=16, max_model_len=256, device="cpu")
    cases = [CASES[i] for i in (4, 10, 14, 28, 30, 32, 34, 36, 37)]
    params = [guided(case, float(t), i, 24) for i, case in enumerate(cases) for t in (0, 1)]
    outputs = generate(llm, params)
    for each, output in zip(params, outputs, strict=True):
        assert is_accepted(llm, each.structured_outputs, output.outputs[0])
    expected = generate(demo_llm(None, 0, **SIZES), params[::2])
    assert tokens_of(outputs[::2]) == tokens_of(expected)


def test_samples_have_matchers_of_their_own_and_a_shared_prefix_changes_nothing(demo_llm):
    llm = demo_llm("demo/eagle3", 4, **SIZES)
    case = {"json": SCHEMAS["flat object"]}
    prompt = PROMPT * 4  # blocks that later requests find in the cache
    runs = [generate(llm, [guided(case, 1.0, 7, 16, n=3)], prompt) for _ in range(2)]
    alone = generate(llm, [guided(case, 1.0, 7 + i, 16) for i in range(3)], prompt)
    for [output] in runs:
        assert [sample.token_ids for sample in output.outputs] == [
            each.outputs[0].token_ids for each in alone
        ]
    assert runs[1][0].num_cached_tokens > 0


def test_an_aborted_request_leaves_the_others_as_they_are(demo_llm):
    llm = demo_llm("demo/eagle3", 4, **SIZES)
    params = guided({"json": SCHEMAS["tree"]}, max_tokens=40)
    [expected] = tokens_of(generate(llm, [params]))
    first, second = llm.engine.add_requests([(PROMPT, params), (PROMPT, params)])
    for _ in range(3):
        llm.engine.step()
    llm.engine.abort(first.request_id)
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert [second.token_ids] == expected


def test_min_tokens_holds_eos_back_until_nothing_else_may_follow(demo_llm):
    llm = demo_llm("demo/eagle3", 4, **SIZES)
    open_, closed = generate(
        llm,
        [
            guided({"regex": "a+"}, min_tokens=9, max_tokens=60),
            guided({"choice": ["ab"]}, min_tokens=9),
        ],
    )
    assert len(open_.outputs[0].token_ids) >= 9
    assert (closed.outputs[0].text, closed.outputs[0].finish_reason) == ("ab", "stop")


def test_stop_strings_and_stop_tokens_end_a_guided_text(demo_llm):
    llm = demo_llm("demo/eagle3", 4, **SIZES)
    [dash] = llm.tokenizer.encode_word("-")
    case = {"regex": "[0-9]{3}-[0-9]{4}"}
    by_text, by_token = generate(llm, [guided(case, stop="-"), guided(case, stop_token_ids=[dash])])
    assert re.fullmatch("[0-9]{3}", by_text.outputs[0].text)
    assert (by_text.outputs[0].stop_reason, by_token.outputs[0].stop_reason) == ("-", dash)


def test_parameters_that_leave_no_token_are_named(demo_llm):
    llm = demo_llm("demo/eagle3", 4, **SIZES)
    [output] = generate(llm, [guided({"choice": ["ab"]}, allowed_token_ids=[5])])
    assert output.outputs[0].finish_reason == "error"
    assert "allowed_token_ids, structured_outputs" in output.outputs[0].stop_reason


def test_a_mask_that_takes_too_long_ends_its_request_and_no_other(demo_llm):
    llm = demo_llm("demo/eagle3", 4, **SIZES)
    [a] = llm.tokenizer.encode_word("a")
    hostile = guided({"grammar": ROWS}, max_tokens=200, logit_bias={a: 100})
    others = [
        guided({"json": SCHEMAS["tree"]}),
        guided({"grammar": GRAMMARS[0]}, temperature=1.0),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    ]
    expected = tokens_of(generate(llm, others))
    found = generate(llm, [others[0], hostile, *others[1:]])
    [sample] = found.pop(1).outputs
    assert tokens_of(found) == expected
    assert sample.finish_reason == "error"
    reason = "structured_outputs: a mask of its grammar takes more than 50 ms"
    assert sample.stop_reason == reason
    assert set(sample.token_ids) == {a}
    with pytest.raises(ValueError, match=reason):  # it is known now
        generate(llm, [hostile])


def test_a_bad_grammar_queues_nothing(demo_llm):
    llm = demo_llm("demo/eagle3", 4, **SIZES)
    with pytest.raises(ValueError, match="unclosed group"):
        generate(llm, [guided({"regex": "a"}), guided({"regex": "(a"})])
    with pytest.raises(ValueError, match="ignore_eos=True with structured_outputs"):
        guided({"regex": "a"}, ignore_eos=True)
    assert not llm.engine.has_unfinished


def test_a_dataclass_is_as_good_as_a_dict(demo_llm):
    llm = demo_llm("demo/eagle3", 4, **SIZES)
    cases = [{"grammar": GRAMMARS[0]}, StructuredOutputsParams(grammar=GRAMMARS[0])]
    first, second = generate(llm, [guided(case) for case in cases])
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_other_requests_run_ahead_while_no_guided_one_runs(monkeypatch):
    llm = LLM("demo", max_num_seqs=4, max_model_len=256, async_scheduling=True, device="cpu")
    in_flight = []
    real = llm.engine._launch
    monkeypatch.setattr(
        llm.engine,
        "_launch",
        lambda work: in_flight.append(len(llm.engine._in_flight)) or real(work),
    )
    free = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    generate(llm, [free])
    assert in_flight[1:] == [1] * 7
    in_flight.clear()
    generate(llm, [guided({"regex": "[0-9]{8,20}"}, max_tokens=8), free])
    assert set(in_flight) == {0}


def test_every_row_of_a_step_comes_from_its_own_request(demo_llm, monkeypatch):
    llm = demo_llm("demo/eagle3", 4, **SIZES)
    kinds = set()
    real = step_masks.StepMasks.of_step

    def of_step(self, work, num_drafts):
        kinds.add((bool(work.verifying), bool(work.parts)))
        return real(self, work, num_drafts)

    monkeypatch.setattr(step_masks.StepMasks, "of_step", of_step)
    digits = guided({"regex": "[0-9]{30}"}, max_tokens=24)
    letters = guided({"regex": "[a-z]{30}"}, max_tokens=24)
    free = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    early = llm.engine.add_requests([(PROMPT, free), (PROMPT, digits)])
    for _ in range(3):
        llm.engine.step()
    late = llm.engine.add_requests([("b", free), ("c", letters), ("d", free), ("e", digits)])
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert (True, True) in kinds
    texts = [request.text() for request in [*early, *late]]
    assert all(re.fullmatch("[0-9]{1,30}", texts[i]) for i in (1, 5))
    assert re.fullmatch("[a-z]{1,30}", texts[3])
