"""Tokens equal plain decoding for every draft, K and batch, and some drafts are accepted."""

import pytest

SETTINGS = [
    (None, 0),
    ("demo/eagle3", 0),
    ("demo/eagle3", 1),
    ("demo/eagle3", 3),
    ("demo/eagle3", 5),
    ("demo/eagle3", 7),
    ("demo/eagle1", 1),
    ("demo/eagle1", 3),
]


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def in_batches(llm, prompts, params, size):
    return [
        output
        for start in range(0, len(prompts), size)
        for output in llm.generate(prompts[start : start + size], params, use_tqdm=False)
    ]


ONE_BY_ONE = [(None, 0), ("demo/eagle3", 5), ("demo/eagle1", 3)]
# the round of EAGLE-3 with K = 1, and the draft of K = 3; the rounds of test_graphs.py
REPEATED = [("demo/eagle1", 1), ("demo/eagle3", 3)]


@pytest.mark.parametrize(
    "draft, k, batch",
    [
        *((draft, k, 1) for draft, k in ONE_BY_ONE),
        *((draft, k, 5) for draft, k in SETTINGS if (draft, k) not in ONE_BY_ONE + REPEATED),
        *(pytest.param(*each, 5, marks=pytest.mark.slow) for each in REPEATED),
        *(pytest.param(*each, 5, marks=pytest.mark.slow) for each in ONE_BY_ONE),
        *(pytest.param(*each, 8, marks=pytest.mark.slow) for each in SETTINGS),
    ],
)
def test_tokens_equal_transformers_greedy_float32(
    demo_llm, greedy, prompts, references, draft, k, batch
):
    count, length = {1: (3, 16), 5: (6, 24), 8: (8, 64)}[batch]
    outputs = in_batches(demo_llm(draft, k), prompts[1:][:count], greedy(length), batch)
    assert tokens_of(outputs) == [reference[:length] for reference in references[1:][:count]]
    mean = demo_llm(draft, k).run_stats(outputs).mean_acceptance_length
    assert mean == 1.0 if k == 0 else mean > 1.4


@pytest.mark.slow
@pytest.mark.parametrize("draft, k", SETTINGS)
@pytest.mark.parametrize("batch", [1, 5, 24])
def test_the_whole_matrix_is_exact(demo_llm, greedy, prompts, references, draft, k, batch):
    outputs = in_batches(demo_llm(draft, k), prompts[:24], greedy(160), batch)
    assert tokens_of(outputs) == references
    stats = demo_llm(draft, k).run_stats(outputs)
    mean = stats.mean_acceptance_length
    print(f"{draft} K={k} batch={batch}: rounds {stats.num_rounds}, mean {mean:.3f}")


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_bfloat16_equals_its_own_plain_decoding(demo_llm, greedy, prompts, k):
    plain = demo_llm(None, 0, dtype="bfloat16").generate(prompts[1:4], greedy(24), use_tqdm=False)
    llm = demo_llm("demo/eagle3", k, dtype="bfloat16")
    together = llm.generate(prompts[1:4], greedy(24), use_tqdm=False)
    assert tokens_of(together) == tokens_of(plain)
    assert llm.run_stats(together).mean_acceptance_length > 1.4


@pytest.mark.parametrize(
    "k", [0, 1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3, 5)), 7]
)
def test_a_request_holds_exactly_max_model_len_tokens(
    demo_llm, greedy, prompts, references, monkeypatch, k
):
    prompt = prompts[1]
    limit = len(prompt) + 40
    llm = demo_llm("demo/eagle3", k, max_model_len=limit)
    num_verified = rows_of_rounds(llm.engine.runner, monkeypatch)
    [output] = llm.generate([prompt], greedy(1000), use_tqdm=False)
    assert output.outputs[0].token_ids == references[1][:40]
    assert output.outputs[0].finish_reason == "length"
    assert len(prompt) + len(output.outputs[0].token_ids) == limit
    # drafts after the last place of the context are not verified, and count nowhere
    num_drafted = []
    num_tokens = len(prompt) + 1
    for count in output.stats.num_accepted:
        num_drafted.append(min(k, limit - num_tokens))
        num_tokens += count + 1
    assert output.stats.num_drafted == num_drafted
    assert num_drafted == [count - 1 for count in num_verified[: len(num_drafted)]]


def rows_of_rounds(runner, monkeypatch):
    """A list that receives the first request's rows of every round, padding left out."""
    counts = []
    real = runner.run_step

    def run_step(rows, *args, **options):
        result = real(rows, *args, **options)
        if rows:
            counts.append(int(runner.buffers.num_valid[0]))
        return result

    monkeypatch.setattr(runner, "run_step", run_step)
    return counts


def test_a_long_prompt_in_several_chunks_changes_nothing(demo_llm, greedy, prompts, references):
    llm = demo_llm("demo/eagle3", 3, max_num_batched_tokens=7)
    whole = demo_llm("demo/eagle3", 3)
    chunked = llm.generate(prompts[3:6], greedy(16), use_tqdm=False)
    assert tokens_of(chunked) == [reference[:16] for reference in references[3:6]]
    expected = whole.generate(prompts[3:6], greedy(16), use_tqdm=False)
    assert [o.stats.rounds for o in chunked] == [o.stats.rounds for o in expected]
