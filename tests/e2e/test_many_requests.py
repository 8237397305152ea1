"""Exactness under scheduling: parts of prompts, packing, preemption, prefix hits, running ahead and
each request's K change no token and no draft; one that fails or ends early harms no other.
"""

from functools import cache
from unittest import mock

import pytest
import torch

from graphs.tape.backend import TapeBackend
from specdec import LLM, SamplingParams
from specdec.requests.request import whole_output
from specdec.sampler import sampler
from specdec.sizes import BLOCK_SIZE
from specdec.start import load
from tests.soak import NUM_ROWS, soak

K = 3
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def prompts(prompts):
    """The short ones: 49, 25, 49, 49, 25, 49 tokens, ..."""
    return [prompt for prompt in prompts if len(prompt) < 64]


@pytest.fixture
def make():
    """make(**options): a new engine with the EAGLE-3 draft."""

    def build(k=K, **options):
        draft = {"model": "demo", "num_speculative_tokens": k, "adaptive": False}
        return LLM(
            "demo", draft, **{"max_num_seqs": 4, "max_model_len": 320, "device": "cpu", **options}
        )

    return build


@pytest.fixture(scope="module")
def alone(prompts, greedy):
    """alone(index): (tokens, rounds) of a prompt's NUM_TOKENS by itself, computed once."""
    draft = {"model": "demo", "num_speculative_tokens": K, "adaptive": False}
    llm = LLM("demo", draft, max_num_seqs=1, max_model_len=320, device="cpu")
    return cache(lambda index: run(llm, prompts[index], greedy(NUM_TOKENS))[0])


@pytest.fixture
def long_prompt(prompts):
    """135 tokens: two whole blocks and a part."""
    return [token for prompt in prompts for token in prompt][:135]


def run(llm, batch, params):
    """(tokens, rounds) of each."""
    outputs = llm.generate(batch, params, use_tqdm=False)
    llm.engine.drain()
    return [(output.outputs[0].token_ids, output.stats.rounds) for output in outputs]


def draft_rows(llm, request, length):
    """The draft's keys and values at the first positions of a request that still has its blocks."""
    cache = llm.engine.runner.draft_cache[:, :, request.blocks]
    return cache.transpose(3, 2).flatten(2, 3)[:, :, :length]


def written_by_prefill(llm, prompt, greedy):
    """The draft's cache after the chunks of a prompt, and the first token."""
    [request] = llm.engine.add_requests([(prompt, greedy(2))])
    while not request.token_ids:
        llm.engine.step()
    found = draft_rows(llm, request, len(prompt)).clone()
    llm.engine.abort_all()
    return found, request.token_ids


def test_chunks_of_any_size_write_the_same_draft_cache_and_give_the_same_tokens(
    make, greedy, prompts
):
    prompt = [token for prompt in prompts for token in prompt][:70]
    whole = written_by_prefill(make(), prompt, greedy)
    for chunk in (1, 7, 64):
        parts = written_by_prefill(make(max_num_batched_tokens=chunk), prompt, greedy)
        assert torch.equal(whole[0], parts[0])
        assert whole[1] == parts[1]
    assert whole[0].abs().sum() > 0


@pytest.mark.parametrize("chunk", [7, pytest.param(64, marks=pytest.mark.slow)])
def test_prompts_packed_into_chunks_of_any_size_give_the_same_tokens_and_rounds(
    make, greedy, prompts, chunk
):
    batch = prompts[:3]
    assert run(make(max_num_batched_tokens=chunk), batch, greedy(NUM_TOKENS)) == run(
        make(), batch, greedy(NUM_TOKENS)
    )


def test_a_prefix_hit_gives_the_tokens_and_rounds_of_a_miss(make, greedy, long_prompt):
    llm = make()
    others = [long_prompt[:-3], [*long_prompt[:130], 5, 6, 7]]
    miss = run(make(enable_prefix_caching=False), [long_prompt, *others], greedy(NUM_TOKENS))
    assert run(llm, long_prompt, greedy(NUM_TOKENS)) == miss[:1]
    hits = llm.generate([long_prompt, *others], greedy(NUM_TOKENS), use_tqdm=False)
    assert [(output.outputs[0].token_ids, output.stats.rounds) for output in hits] == miss
    assert [output.stats.num_cached_tokens for output in hits] == [128, 128, 128]


def test_a_block_is_not_found_after_other_blocks_than_its_own(make, greedy, prompts):
    tokens = [token for prompt in prompts for token in prompt]
    first, other, shared, rest = tokens[:64], tokens[64:128], tokens[128:197], tokens[200:268]
    llm = make()
    plain = make(enable_prefix_caching=False)
    params = greedy(NUM_TOKENS, logprobs=2)
    # `other` is found, as `shared` follows it too; `shared` itself is cached only after `first`
    assert first != other
    run(llm, [first + shared, [*other, shared[0], *rest]], greedy(1))
    [hit], [miss] = (
        each.generate([other + shared], params, use_tqdm=False) for each in (llm, plain)
    )
    assert (hit.stats.num_cached_tokens, miss.stats.num_cached_tokens) == (BLOCK_SIZE, 0)
    assert (hit.outputs[0].token_ids, hit.stats.rounds) == (
        miss.outputs[0].token_ids,
        miss.stats.rounds,
    )
    assert [row.keys() for row in hit.outputs[0].logprobs] == [
        row.keys() for row in miss.outputs[0].logprobs
    ]
    for ours, theirs in zip(hit.outputs[0].logprobs, miss.outputs[0].logprobs, strict=True):
        assert all(abs(ours[token].logprob - theirs[token].logprob) < 1e-5 for token in theirs)


def test_what_rounds_wrote_is_a_prefix_too(make, greedy, long_prompt):
    llm = make()
    plain = make(enable_prefix_caching=False)
    prompt = long_prompt[:120]
    [(tokens, _)] = run(llm, prompt, greedy(20))
    follow_up = prompt + tokens + [11, 12]
    [hit] = llm.generate([follow_up], greedy(NUM_TOKENS), use_tqdm=False)
    assert [(hit.outputs[0].token_ids, hit.stats.rounds)] == run(
        plain, follow_up, greedy(NUM_TOKENS)
    )
    assert hit.stats.num_cached_tokens == (120 + 20 - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_what_rounds_without_drafts_wrote_is_no_prefix(make, greedy, prompts, long_prompt):
    """The draft has read the tokens of those rounds in which a prompt rode, and no others."""
    llm = make(max_num_batched_tokens=8)
    params = greedy(32, speculate=False)
    short = long_prompt[:40], prompts[5]
    [(tokens, _), _] = run(llm, short, params)
    follow_up = [*short[0], *tokens, 11, 12]
    [hit] = llm.generate([follow_up], greedy(NUM_TOKENS), use_tqdm=False)
    assert [(hit.outputs[0].token_ids, hit.stats.rounds)] == run(
        make(enable_prefix_caching=False), follow_up, greedy(NUM_TOKENS)
    )
    assert hit.stats.num_cached_tokens == 0


@pytest.mark.parametrize("k", [0, 3])
def test_running_ahead_changes_no_token_and_no_round(make, greedy, prompts, k):
    lengths = [1, 2, 5, 9, 17, NUM_TOKENS]
    params = [greedy(length) for length in lengths]
    ahead, in_step = (make(k, async_scheduling=is_async) for is_async in (True, False))
    assert run(ahead, prompts[:6], params) == run(in_step, prompts[:6], params)
    assert ahead.engine.scheduler.pool.num_free == ahead.sizes.num_kv_blocks


@pytest.mark.parametrize("is_async", [False, True])
def test_the_longest_context_of_a_round_is_bounded_by_its_last_row(
    make, greedy, prompts, monkeypatch, is_async
):
    llm = make(async_scheduling=is_async)
    slack = []
    runner = llm.engine.runner
    real = llm.engine.runner.run_step

    def run_step(rows, parts, **options):
        if rows:
            computed = int(runner.state.num_computed_tokens[rows].max())
            slack.append(options["max_num_computed"] - computed - options["shape"].rows)
        return real(rows, parts, **options)

    monkeypatch.setattr(runner, "run_step", run_step)
    run(llm, prompts[:2], [greedy(NUM_TOKENS), greedy(5)])
    assert min(slack) == 0
    assert max(slack) <= (K if is_async else 0)  # the round in flight may accept all of its drafts


def test_the_longest_context_of_the_drafts_own_rows_is_bounded_by_the_last(
    make, greedy, prompts, monkeypatch
):
    llm = make()
    slack = []
    runner = llm.engine.runner
    draft = llm.engine.runner.draft
    real = draft._propose_further

    def further(context, proposal):
        real(context, proposal)
        positions = runner.buffers.draft_positions[: context.num_tokens]
        [rows] = context.attn_metadata.groups
        slack.append(rows.max_seq_len - int(positions.max()) - 1)

    monkeypatch.setattr(draft, "_propose_further", further)
    run(llm, prompts[3:5], greedy(NUM_TOKENS))
    assert len(slack) > 5
    assert min(slack) >= 0


def test_results_are_read_one_step_late_when_running_ahead(make, greedy, prompts):
    engine = make(async_scheduling=True).engine
    [request] = engine.add_requests([(prompts[0], greedy(NUM_TOKENS))])
    assert engine.step() == []  # the chunk
    assert engine.step() == [request]  # the first round is launched, the chunk is read
    assert (len(request.token_ids), request.num_in_flight) == (1, 1)


@pytest.mark.parametrize(
    "max_num_seqs, lengths",
    [(1, [5, 8]), (3, [NUM_TOKENS, 3, 9, 7, 5]), (4, [9] * 8)],
    ids=["alone", "few", "many that end together"],
)
def test_no_step_is_launched_for_requests_that_the_one_before_may_have_ended(
    make, greedy, prompts, monkeypatch, max_num_seqs, lengths
):
    """Others wait for their places."""
    counts = []
    for is_async in (False, True):
        llm = make(async_scheduling=is_async, max_num_seqs=max_num_seqs)
        run_step = mock.Mock(wraps=llm.engine.runner.run_step)
        monkeypatch.setattr(llm.engine.runner, "run_step", run_step)
        params = [greedy(length) for length in lengths]
        llm.generate([prompts[4]] * len(lengths), params, use_tqdm=False)
        counts.append(run_step.call_count)
    assert counts[0] == counts[1]


def test_steps_run_ahead_of_one_of_many_that_may_end(make, greedy, prompts, monkeypatch):
    engine = make(async_scheduling=True, max_num_seqs=6).engine
    depths = steps_in_flight(engine, monkeypatch)
    requests = engine.add_requests([(prompts[i], greedy(40 if i else 6)) for i in range(6)])
    while requests[0].finish is None:
        engine.step()
    assert len(depths) > 2
    assert set(depths[1:]) == {2}  # with the one whose results are not read


def test_steps_run_ahead_of_requests_that_are_sure_to_end(make, greedy, prompts, monkeypatch):
    engine = make(0, async_scheduling=True, max_num_seqs=3).engine
    depths = steps_in_flight(engine, monkeypatch)
    engine.add_requests([(prompts[i], greedy(6 + i)) for i in range(9)])  # six wait for places
    while engine.scheduler.waiting:
        engine.step()
    assert len(depths) > 12
    assert set(depths[1:]) == {2}


def steps_in_flight(engine, monkeypatch):
    """At each launch, with the launched one."""
    real, depths = engine.runner.run_step, []

    def run_step(*args, **options):
        depths.append(engine.scheduler.num_in_flight)
        return real(*args, **options)

    monkeypatch.setattr(engine.runner, "run_step", run_step)
    return depths


SAMPLED = {
    "temperature": 0.8,
    "seed": 3,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.5,
    "bad_words": ["return"],
}


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"temperature": 0.0}, id="greedy"),
        pytest.param(SAMPLED, id="sampled", marks=pytest.mark.slow),
    ],
)
def test_preempted_requests_write_what_they_write_alone(make, prompts, values):
    params = SamplingParams(max_tokens=24, ignore_eos=True, **values)
    batch = [prompts[i] for i in (0, 2, 3)]  # 49 tokens each
    short = make(num_kv_blocks=3, max_num_seqs=4, enable_prefix_caching=False)
    outputs = short.generate(batch, params, use_tqdm=False)
    index = next(index for index, output in enumerate(outputs) if output.stats.num_preemptions)
    assert (
        outputs[index].outputs[0].token_ids == run(make(max_num_seqs=1), batch[index], params)[0][0]
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [24] * 3
    assert short.engine.scheduler.pool.num_free == 3


PENALIZED = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "bad_words": ["return"]}


@pytest.mark.parametrize(
    "acceptance, more",
    [
        pytest.param("exact", PENALIZED, id="exact-penalized"),
        pytest.param("rejection", {}, id="rejection", marks=pytest.mark.slow),
        pytest.param("block", PENALIZED, id="block-penalized", marks=pytest.mark.slow),
        pytest.param("exact", {}, id="exact", marks=pytest.mark.slow),
        pytest.param("rejection", PENALIZED, id="rejection-penalized", marks=pytest.mark.slow),
        pytest.param("block", {}, id="block", marks=pytest.mark.slow),
    ],
)
def test_preempted_requests_draw_what_they_would_have_drawn(prompts, acceptance, more):
    """Not one token and not one round is another than with a cache that is large enough."""
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True, **more)
    batch = [prompts[i] for i in (0, 2, 3, 5)]  # 49 tokens each
    speculation = {"model": "demo", "num_speculative_tokens": K, "acceptance": acceptance}
    short, large = (
        LLM(
            "demo",
            speculation,
            device="cpu",
            max_num_seqs=4,
            max_model_len=320,
            num_kv_blocks=num_blocks,
        )
        for num_blocks in (3, 40)
    )
    outputs = short.generate(batch, params, use_tqdm=False)
    assert sum(output.stats.num_preemptions for output in outputs) >= 2
    assert [(output.outputs[0].token_ids, output.stats.rounds) for output in outputs] == run(
        large, batch, params
    )


def test_a_preempted_request_keeps_its_logprobs(make, prompts):
    params = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    batch = [prompts[i] for i in (0, 2, 3)]
    short = make(num_kv_blocks=3)
    alone = make(max_num_seqs=1)
    outputs = short.generate(batch, params, use_tqdm=False)
    index = next(index for index, output in enumerate(outputs) if output.stats.num_preemptions)
    [expected] = alone.generate([batch[index]], params, use_tqdm=False)
    assert outputs[index].outputs[0].logprobs == expected.outputs[0].logprobs
    assert outputs[index].prompt_logprobs == expected.prompt_logprobs


def test_each_request_has_its_own_k(make, greedy, prompts):
    own = [0, 1, 2, 3]
    llm = make(num_kv_blocks=20)
    outputs = llm.generate(
        prompts[:4], [greedy(NUM_TOKENS, num_speculative_tokens=k) for k in own], use_tqdm=False
    )
    for k, prompt, output in zip(own, prompts, outputs, strict=False):
        tokens, rounds = run(make(k), prompt, greedy(NUM_TOKENS))[0]
        assert output.outputs[0].token_ids == tokens
        assert output.stats.rounds == rounds
        assert set(output.stats.num_drafted) == {k}


def test_requests_that_do_not_speculate_run_rounds_of_one_row(make, greedy, prompts, monkeypatch):
    llm = make()
    lengths = []
    real = llm.engine.runner.run_step
    monkeypatch.setattr(
        llm.engine.runner,
        "run_step",
        lambda *args, **options: lengths.append(options["shape"].rows) or real(*args, **options),
    )
    params = [greedy(6, speculate=False), greedy(NUM_TOKENS, speculate=False)]
    plain = run(llm, prompts[:2], params)
    drafted = set(lengths)
    assert drafted == {1}
    assert [tokens for tokens, _ in plain] == [
        tokens for tokens, _ in run(make(0), prompts[:2], params)
    ]
    run(llm, prompts[:2], [greedy(NUM_TOKENS), greedy(NUM_TOKENS, speculate=False)])
    assert set(lengths) == {1, K + 1}


def test_more_drafts_than_the_engine_has_are_refused(make, greedy, prompts):
    with pytest.raises(
        ValueError,
        match="num_speculative_tokens=4 of a request: the engine was built for at most 3",
    ):
        make().generate(prompts[0], greedy(4, num_speculative_tokens=4))


@pytest.mark.parametrize(
    "num_steps", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 3, 5]
)
def test_an_abort_at_any_moment_frees_everything_and_leaves_the_others(
    make, alone, greedy, prompts, num_steps
):
    llm = make(max_num_batched_tokens=8, async_scheduling=True)
    engine = llm.engine
    gone, stays = engine.add_requests(
        [(prompts[0], greedy(NUM_TOKENS)), (prompts[1], greedy(NUM_TOKENS))]
    )
    for _ in range(num_steps):
        engine.step()
    assert engine.abort(gone.request_id) == [gone]
    assert engine.abort(gone.request_id) == []
    while engine.has_unfinished:
        engine.step()
    engine.drain()
    assert (
        whole_output(gone).outputs[0].finish_reason,
        whole_output(stays).outputs[0].finish_reason,
    ) == (
        "abort",
        "length",
    )
    assert stays.token_ids == alone(1)[0]
    assert engine.scheduler.pool.num_free == llm.sizes.num_kv_blocks
    assert not engine.scheduler.has_unfinished


@pytest.mark.parametrize("verifies", [False, True])
def test_a_step_without_memory_ends_its_own_requests_only(
    make, alone, greedy, prompts, monkeypatch, verifies
):
    llm = make(max_num_seqs=2)
    runner = llm.engine.runner
    failures = [torch.OutOfMemoryError("tried to allocate 1 GiB")]
    real = runner.run_step

    def fails_once(rows, *args, **options):
        if failures and bool(rows) == verifies:
            raise failures.pop()
        return real(rows, *args, **options)

    monkeypatch.setattr(runner, "run_step", fails_once)
    outputs = llm.generate(prompts[:4], greedy(NUM_TOKENS), use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == [
        "error",
        "error",
        "length",
        "length",
    ]
    assert "out of memory in a" in outputs[0].outputs[0].stop_reason
    assert (
        "lower gpu_memory_utilization, max_num_seqs or max_num_batched_tokens"
        in outputs[0].outputs[0].stop_reason
    )
    for index, output in enumerate(outputs[2:], 2):
        assert output.outputs[0].token_ids == alone(index)[0]
    assert llm.engine.scheduler.pool.num_free == llm.sizes.num_kv_blocks


@pytest.mark.parametrize("is_async", [False, True])
def test_a_mixed_step_without_memory_ends_exactly_its_requests(
    make, alone, greedy, prompts, monkeypatch, is_async
):
    """One verifies, a prompt goes on; the third waits for rows, the last for a slot."""
    llm = make(max_num_seqs=3, max_num_batched_tokens=8, async_scheduling=is_async)
    runner = llm.engine.runner
    failures = [torch.OutOfMemoryError("tried to allocate 1 GiB")]
    real = runner.run_step

    def fails_once(rows, parts, **options):
        if failures and rows and parts:
            raise failures.pop()
        return real(rows, parts, **options)

    monkeypatch.setattr(runner, "run_step", fails_once)
    outputs = llm.generate(prompts[2:6], greedy(NUM_TOKENS), use_tqdm=False)
    llm.engine.drain()
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["error", "error", "length", "length"]
    assert "out of memory in a step of 2 requests" in outputs[0].outputs[0].stop_reason
    found = [(output.outputs[0].token_ids, output.stats.rounds) for output in outputs[2:]]
    assert found == [alone(4), alone(5)]
    assert llm.engine.scheduler.pool.num_free == llm.sizes.num_kv_blocks


@pytest.fixture
def poisoned(make):
    """poisoned(token, **options): an engine that computes no numbers where a token is read."""

    def build(token, **options):
        llm = make(**options)
        embed = llm.engine.runner.target.model.embed_tokens
        # a copy, since the head shares it
        embed.weight = torch.nn.Parameter(embed.weight.clone(), requires_grad=False)
        embed.weight[token] = torch.nan
        return llm

    return build


POISON = 901


@pytest.mark.parametrize("place", ["prompt", "round"])
def test_an_error_row_of_a_mixed_step_ends_its_own_request_only(
    alone, poisoned, greedy, prompts, monkeypatch, place
):
    indices = [index for index, prompt in enumerate(prompts) if POISON not in prompt][1:5]
    others = [prompts[index] for index in indices]
    expected = [alone(index) for index in indices]
    assert all(POISON not in tokens for tokens, _ in expected)
    engine = poisoned(POISON, max_num_batched_tokens=8).engine
    kinds = []
    real = engine.runner.run_step

    def run_step(rows, parts, **options):
        kinds.append((len(rows) > 0, len(parts) > 0))
        return real(rows, parts, **options)

    monkeypatch.setattr(engine.runner, "run_step", run_step)
    # its first token is the poison, so that its first round reads it
    bad = ([*others[1][:9], POISON, 5], greedy(8))
    if place == "round":
        bad = (others[1][:9], greedy(8, logit_bias={POISON: 100}))
    batch = [(prompt, greedy(NUM_TOKENS)) for prompt in others]
    first, failing, *rest = engine.add_requests([batch[0], bad, *batch[1:]])
    while failing.finish is None:
        engine.step()
    assert kinds[-1] == (True, True)
    assert (failing.finish.reason, failing.token_ids) == (
        "error",
        [POISON] if place == "round" else [],
    )
    assert "not finite" in failing.finish.stop_reason
    while engine.has_unfinished:
        engine.step()
    assert [(each.token_ids, each.stats.rounds) for each in (first, *rest)] == expected


def test_logprobs_of_a_step_without_memory_are_not_those_of_the_next(
    make, greedy, prompts, monkeypatch
):
    llm = make(max_num_seqs=1)
    failures = [torch.OutOfMemoryError("tried to allocate 1 GiB")]
    real = sampler.process_logits

    def fails_once(*args):
        if failures:
            raise failures.pop()
        return real(*args)

    monkeypatch.setattr(sampler, "process_logits", fails_once)
    params = [greedy(3, logprobs=1), greedy(3)]
    failed, ended = llm.generate(prompts[:2], params, use_tqdm=False)
    assert "out of memory" in failed.outputs[0].stop_reason
    assert (ended.outputs[0].finish_reason, len(ended.outputs[0].token_ids)) == ("length", 3)


def test_logits_that_are_no_numbers_end_their_own_request_only(alone, poisoned, greedy, prompts):
    llm = poisoned(POISON, num_kv_blocks=12)
    indices = [index for index, prompt in enumerate(prompts) if POISON not in prompt][:6]
    others = [prompts[index] for index in indices]
    expected = [alone(index) for index in indices]
    assert all(POISON not in tokens for tokens, _ in expected)
    batch = [others[0], [*others[1], POISON, 5], *others[1:]]
    outputs = llm.generate(batch, greedy(NUM_TOKENS), use_tqdm=False)
    bad = outputs.pop(1)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == ("error", [])
    assert "not finite" in bad.outputs[0].stop_reason
    # those that come later take its row and its blocks
    assert [(output.outputs[0].token_ids, output.stats.rounds) for output in outputs] == expected


def test_an_interrupted_generate_leaves_nothing_running(make, greedy, prompts, monkeypatch):
    llm = make()
    real = llm.engine.runner.run_step

    def is_interrupted(rows, *args, **options):
        if rows:
            raise KeyboardInterrupt
        return real(rows, *args, **options)

    monkeypatch.setattr(llm.engine.runner, "run_step", is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts[:3], greedy(NUM_TOKENS), use_tqdm=False)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    "place, is_async",
    [
        ("start_rows", False),
        ("run_step", True),
        pytest.param("start_rows", True, marks=pytest.mark.slow),
        pytest.param("run_step", False, marks=pytest.mark.slow),
    ],
)
def test_an_engine_serves_after_an_interrupted_step(
    make, greedy, prompts, monkeypatch, place, is_async
):
    llm = make(max_num_seqs=2, async_scheduling=is_async)
    expected = run(llm, prompts[:3], greedy(NUM_TOKENS))
    stream = llm.stream(prompts[3], greedy(NUM_TOKENS))
    with monkeypatch.context() as patch:
        patch.setattr(
            llm.engine.runner,
            place,
            lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt("now")),
        )
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts[:3], greedy(NUM_TOKENS), use_tqdm=False)
    scheduler = llm.engine.scheduler
    assert (scheduler.pool.num_free, scheduler.num_in_flight) == (llm.sizes.num_kv_blocks, 0)
    assert [(piece.finish_reason, piece.stop_reason) for piece in stream] == [
        ("error", "a step was interrupted: KeyboardInterrupt: now")
    ]
    assert run(llm, prompts[:3], greedy(NUM_TOKENS)) == expected


def test_streamed_pieces_join_to_the_whole_output(make, prompts):
    llm = make(async_scheduling=True)
    params = SamplingParams(temperature=0.7, seed=5, n=2, max_tokens=40, logprobs=1)
    pieces = list(llm.stream(prompts[5], params))
    [whole] = llm.generate(prompts[5], params, use_tqdm=False)
    for sample in whole.outputs:
        own = [piece for piece in pieces if piece.index == sample.index]
        assert "".join(piece.text for piece in own) == sample.text
        assert [token for piece in own for token in piece.token_ids] == sample.token_ids
        assert [row for piece in own for row in piece.logprobs] == sample.logprobs
        assert [piece.finish_reason for piece in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == sample.finish_reason
    assert len(pieces) > 6


def test_streams_read_in_turn_miss_nothing(make, greedy, prompts):
    """Each stream's steps serve the other too; the shorter one ends in a step of the longer one."""
    llm = make()
    params = [greedy(NUM_TOKENS), greedy(NUM_TOKENS - 8)]
    expected = llm.generate(prompts[:2], params, use_tqdm=False)
    streams = [llm.stream(prompt, each) for prompt, each in zip(prompts[:2], params, strict=True)]
    pieces = [[next(stream)] for stream in streams]
    llm.generate(prompts[2], greedy(4), use_tqdm=False)
    while any(new := [next(stream, None) for stream in streams]):
        for own, piece in zip(pieces, new, strict=True):
            own += [piece] if piece is not None else []
    for own, output in zip(pieces, expected, strict=True):
        assert "".join(piece.text for piece in own) == output.outputs[0].text
        assert [token for piece in own for token in piece.token_ids] == output.outputs[0].token_ids
        assert own[-1].finish_reason == "length"


def test_a_stream_left_early_is_aborted(make, greedy, prompts):
    llm = make()
    for piece in llm.stream(prompts[0], greedy(NUM_TOKENS)):
        assert piece.token_ids
        break
    assert not llm.engine.has_unfinished
    assert llm.engine.scheduler.pool.num_free == llm.sizes.num_kv_blocks


def test_higher_priorities_are_answered_first(make, greedy, prompts):
    llm = make(max_num_seqs=1)
    ended = []
    real = llm.engine.step

    def step():
        changed = real()
        ended.extend(request.request_id for request in changed if request.is_finished)
        return changed

    llm.engine.step = step
    outputs = llm.generate(prompts[:3], greedy(2), use_tqdm=False, priority=[2, 0, 1])
    assert ended == [outputs[1].request_id, outputs[2].request_id, outputs[0].request_id]


def tape_unless_eager(config, device, has_draft):
    return None if config.enforce_eager else TapeBackend()


@pytest.mark.usefixtures("no_late_compilation")
@pytest.mark.parametrize(
    "backend, count, seed",
    [
        ("eager", 7, 2),
        pytest.param("eager", 14, 2, marks=pytest.mark.slow),
        pytest.param("eager", 30, 2, marks=pytest.mark.slow),
        pytest.param("tape", 15, 14, marks=pytest.mark.slow),
        pytest.param("eager", 300, 0, marks=pytest.mark.slow),
        pytest.param("tape", 300, 0, marks=pytest.mark.slow),
        pytest.param("cuda", 300, 0, marks=pytest.mark.gpu),
    ],
)
def test_random_requests_give_together_what_each_gives_alone(backend, count, seed, monkeypatch):
    device = "cuda" if backend == "cuda" else "cpu"
    options = {}
    if backend == "tape":
        options["cuda_graph_sizes"] = (2, NUM_ROWS)
        monkeypatch.setattr(load, "graph_backend", tape_unless_eager)
    result = soak(count, seed, device, **options)
    assert result["faults"] == []
    happened = ["mixed_steps", "cached_tokens", "aborted", "logprobs"]
    happened += ["preemptions"] if count > 15 else []
    assert {name for name in happened if not result[name]} == set()
    assert (result["replays"] > 0) == (backend != "eager")
