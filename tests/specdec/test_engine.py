"""Ends of a text by the whole engine: the same for every K and place in a round, and no excess.

Prompt 3 of the bundled pair continues with 16 tokens, long spans of which drafts of K = 3 and 5
get right.
"""

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.parallel.processes import RankError
from specdec.rounds.results import PendingResult
from tests.reference import Cache, Reference
from weights.demo import demo_directory

NUM_TOKENS = 16
PROMPT_INDEX = 3


@pytest.fixture(scope="module", params=[0, pytest.param(3, marks=pytest.mark.slow), 5])
def llm(request):
    speculation = {"model": "demo", "num_speculative_tokens": request.param}
    return LLM("demo", speculation, max_num_seqs=32, max_model_len=256, device="cpu")


@pytest.fixture(scope="module")
def written(references):
    """What the target writes after the prompt."""
    return references[PROMPT_INDEX][:NUM_TOKENS]


@pytest.fixture
def run(llm, prompts):
    """run([parameters]): completions of the prompt, one for each, all in one batch."""

    def generate(batch):
        params = [
            SamplingParams(temperature=0.0, **{"max_tokens": NUM_TOKENS} | values)
            for values in batch
        ]
        outputs = llm.generate([prompts[PROMPT_INDEX]] * len(batch), params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    return generate


def firsts(tokens):
    """Every token with the place where it is written first."""
    return sorted((tokens.index(token), token) for token in set(tokens))


def test_a_limit_at_every_position_cuts_there(llm, run, written):
    completions = run([{"max_tokens": n} for n in range(1, NUM_TOKENS + 1)])
    for n, completion in enumerate(completions, start=1):
        assert completion.token_ids == written[:n]
        assert completion.text == llm.tokenizer.decode(written[:n])
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_a_stop_token_at_every_position_cuts_there(llm, run, written):
    completions = run([{"stop_token_ids": [token]} for _, token in firsts(written)])
    for (index, token), completion in zip(firsts(written), completions, strict=True):
        assert completion.token_ids == written[: index + 1]
        assert completion.text == llm.tokenizer.decode(written[:index])
        assert (completion.finish_reason, completion.stop_reason) == ("stop", token)


@pytest.mark.parametrize(
    "index", [0, 3, 8, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2, 6))]
)
def test_an_eos_cuts_ids_and_text_and_an_ignored_one_does_not(
    llm, run, written, monkeypatch, index
):
    monkeypatch.setattr(llm.engine.intake, "eos_token_ids", frozenset({written[index]}))
    ended, ignored, too_late = run([{}, {"ignore_eos": True}, {"max_tokens": max(index, 1)}])
    assert (ended.token_ids, ended.text) == (
        written[: index + 1],
        llm.tokenizer.decode(written[:index]),
    )
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert (ignored.token_ids, ignored.finish_reason) == (written, "length")
    assert too_late.finish_reason == ("length" if index else "stop")


@pytest.mark.parametrize("is_kept", [False, True])
def test_stop_strings_end_the_text_wherever_rounds_and_tokens_part_them(llm, run, written, is_kept):
    text = llm.tokenizer.decode(written)
    starts = [0, 1, 7, 20, 33, len(text) - 12]
    stops = [text[start : start + length] for start in starts for length in (1, 5, 12)]
    completions = run([{"stop": stop, "include_stop_str_in_output": is_kept} for stop in stops])
    for stop, completion in zip(stops, completions, strict=True):
        num_tokens = next(
            n for n in range(NUM_TOKENS + 1) if stop in llm.tokenizer.decode(written[:n])
        )
        assert completion.token_ids == written[:num_tokens]
        assert completion.text == text[: text.index(stop) + is_kept * len(stop)]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_the_first_of_several_ends_wins(run, written, llm):
    pieces = [llm.tokenizer.decode([token]) for token in written]
    both = {"stop": [pieces[5]], "stop_token_ids": [written[4]]}
    at_once = {"stop": [pieces[4]], "stop_token_ids": [written[4]], "max_tokens": 5}
    reasons = [
        completion.stop_reason for completion in run([both, at_once, {**both, "max_tokens": 4}])
    ]
    assert reasons == [written[4], pieces[4], None]


@pytest.mark.parametrize("min_tokens", [3, 9, 16])
def test_min_tokens_masks_what_would_end_the_text(
    run, llm, prompts, written, min_tokens, monkeypatch
):
    monkeypatch.setattr(llm.engine.intake, "eos_token_ids", frozenset({written[1]}))
    stops = [written[2], written[5], written[7]]
    expected = masked_greedy(prompts[PROMPT_INDEX], {written[1], *stops}, min_tokens)
    [completion] = run([{"stop_token_ids": stops, "min_tokens": min_tokens}])
    assert completion.token_ids == expected
    assert len(expected) >= min_tokens
    assert expected[:2] != written[:2]


def masked_greedy(prompt, stops, min_tokens):
    """The reference's tokens if stops are excluded up to min_tokens and end the text afterwards."""
    reference = Reference(demo_directory("target"))
    cache = Cache()
    tokens = []
    fed = prompt
    while len(tokens) < NUM_TOKENS:
        logits_V = reference.forward(fed, cache).logits_TV[-1]
        if len(tokens) < min_tokens:
            logits_V[torch.tensor(sorted(stops))] = -torch.inf
        fed = [int(logits_V.argmax())]
        tokens += fed
        if len(tokens) > min_tokens and fed[0] in stops:
            break
    return tokens


def test_a_stop_token_ends_the_text_right_after_min_tokens_and_not_before(run, written):
    after = run(
        [{"stop_token_ids": [token], "min_tokens": index} for index, token in firsts(written)]
    )
    before = run(
        [{"stop_token_ids": [token], "min_tokens": index + 1} for index, token in firsts(written)]
    )
    for (index, token), ended, masked in zip(firsts(written), after, before, strict=True):
        assert (ended.token_ids, ended.stop_reason) == (written[: index + 1], token)
        assert masked.token_ids[:index] == written[:index]
        assert masked.token_ids[index] != token


def test_min_tokens_holds_stop_strings_off(run, llm, written):
    piece = llm.tokenizer.decode([written[2]])
    early, late = run([{"stop": piece, "min_tokens": 2}, {"stop": piece, "min_tokens": 3}])
    assert (early.token_ids, early.stop_reason) == (written[:3], piece)
    assert len(late.token_ids) > 3


def test_rounds_count_what_they_accepted_before_the_cut(llm, prompts, written):
    K = llm.sizes.num_speculative_tokens
    params = SamplingParams(temperature=0.0, stop_token_ids=[written[1]])
    [output] = llm.generate([prompts[PROMPT_INDEX]], params, use_tqdm=False)
    assert (output.stats.num_rounds, output.stats.num_generated_tokens) == (1, 2)
    assert output.stats.num_accepted == [K]  # drafts after the stop token were accepted, too
    assert output.stats.num_drafted == [K]


def test_nothing_of_an_ended_request_reaches_the_next(llm, run, written):
    run([{"stop_token_ids": [token], "min_tokens": 1} for token in written[:6]])
    [completion] = run([{}])
    assert completion.token_ids == written
    assert llm.engine.scheduler.pool.num_free == llm.sizes.num_kv_blocks


def test_times_and_rounds_are_of_tokens_that_came(llm, prompts):
    [eos] = llm.engine.intake.eos_token_ids
    nothing = SamplingParams(temperature=0.0, allowed_token_ids=[eos], min_tokens=1)
    [output] = llm.generate(prompts[:1], nothing, use_tqdm=False)
    stats = output.stats
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [])
    assert (stats.first_token_time, stats.last_token_time, stats.rounds) == (None, None, [])


def test_gauges_count_what_has_not_ended(prompts):
    """Where the step after the last one is launched before it is read."""
    with LLM("demo", max_num_seqs=2, max_model_len=256, device="cpu", async_scheduling=True) as llm:
        stop = SamplingParams(temperature=0.0, max_tokens=9)
        first = llm.generate(prompts[:1], stop, use_tqdm=False)[0].outputs[0].token_ids
        params = SamplingParams(temperature=0.0, max_tokens=90, stop_token_ids=[first[4]])
        requests = llm.engine.add_requests([(prompt, params) for prompt in prompts[:1] * 3])
        while llm.engine.has_unfinished:
            llm.engine.step()
            num_unfinished = sum(request.finish is None for request in requests)
            assert gauge(llm, "num_requests_running") <= num_unfinished
            total = gauge(llm, "num_requests_running") + gauge(llm, "num_requests_waiting")
            assert total == num_unfinished
            assert (gauge(llm, "kv_cache_usage_perc") > 0) == any(
                request.blocks for request in requests if request.finish is None
            )
        assert llm.engine.scheduler.num_in_flight > 0, "a step was launched ahead"


def gauge(llm, name):
    """The value of one metric."""
    [value] = [each.value for each in llm.get_metrics() if each.name == f"specdec:{name}"]
    return value


def test_a_prompt_is_found_in_the_cache_at_most_once(prompts):
    speculation = {"model": "demo", "num_speculative_tokens": 3}
    with LLM("demo", speculation, num_kv_blocks=8, max_model_len=512, device="cpu") as llm:
        batch = [(prompts[index] * 9)[:90] for index in range(3)]
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        outputs = llm.generate(batch, params, use_tqdm=False)
        assert sum(output.stats.num_preemptions for output in outputs) > 0
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
        counts = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
        assert counts["specdec:prefix_cache_queries"] == 3 * 90
        assert counts["specdec:prefix_cache_hits"] == 0


class FailingRanks:
    """Other ranks, one of which fails once so many results were read."""

    def __init__(self, left):
        self.left = left

    def step(self, step):
        return step

    def start_rows(self, starts, grown):
        pass

    def compare(self, pending, result):
        pass

    def check(self):
        if self.left == 0:
            raise RankError("rank 1 ended")

    def fail_after(self, error):
        self.left = 0


@pytest.mark.parametrize("num_read", [0, 3])
def test_what_was_read_after_a_rank_has_failed_is_not_delivered(monkeypatch, num_read):
    """Rank 0's device no longer waits for the others then, so it may be anything."""
    llm = LLM("demo", None, max_model_len=256, device="cpu")
    followers = FailingRanks(num_read + 1)
    llm.engine.runner.followers = followers
    read = PendingResult.read

    def failing(pending):
        followers.left -= 1
        return read(pending)

    monkeypatch.setattr(PendingResult, "read", failing)
    params = SamplingParams(temperature=0.0, max_tokens=num_read + 1, ignore_eos=True)
    (request,) = llm.engine.add_requests([("def", params)])
    for _ in range(num_read):
        llm.engine.step()
    with pytest.raises(RankError, match="rank 1 ended"):
        llm.engine.step()
    assert request.finish.reason == "error"
    assert len(request.token_ids) == num_read
