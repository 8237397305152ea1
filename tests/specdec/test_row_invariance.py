"""A row's bits depend on its own tokens only: not on batch mates, place, chunk or kind of step.

This is what makes speculation exact, so it is held for the blocks of specdec/kernels/invariant.py
and for whole steps.
"""

import pytest
import torch

from specdec.kernels.invariant import blocked_exp, blocked_product, tree_sum
from specdec.kernels.linear import linear
from specdec.rounds.upload import RowStart
from specdec.runner import Runner
from specdec.scheduling.work import PromptPart
from specdec.sizes import EngineSizes
from tests.specdec.tiny_pair import changed, on_disk, random_draft
from tests.weights.published import save
from tests.weights.tiny import eagle3_config, tiny_target
from weights import load_target

NUM_ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 200]
WIDTHS = [
    (1, 1),
    (7, 5),
    (16, 32),
    (37, 2),
    (37, 30),
    (96, 33),
    (100, 1),
    (129, 3),
    (129, 64),
    (256, 100),
]
WHERE = [0, 1, 7, 100, 199]  # rows of 200 that are compared


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def windows(num_rows):
    """Slices of that many rows of 200 with a compared row, at different places of the slice."""
    for row in WHERE:
        for place in {0, num_rows // 2, num_rows - 1}:
            if 0 <= row - place <= 200 - num_rows:
                yield row, place, slice(row - place, row - place + num_rows)


@pytest.mark.parametrize("num_in, num_out", WIDTHS)
@pytest.mark.parametrize("product", [blocked_product, linear])
def test_a_product_gives_a_row_the_same_bits_among_any_rows(product, num_in, num_out):
    x_TK, weight_NK = rows(200, num_in), rows(num_out, num_in, seed=1)
    alone = {row: product(x_TK[row : row + 1], weight_NK)[0] for row in WHERE}
    for num_rows in NUM_ROWS:
        for row, place, window in windows(num_rows):
            assert torch.equal(product(x_TK[window], weight_NK)[place], alone[row]), (
                num_rows,
                row,
                place,
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_in_half_precision_does_so_too(dtype):
    x_TK, weight_NK = rows(200, 37).to(dtype), rows(30, 37, seed=1).to(dtype)
    alone = linear(x_TK[7:8], weight_NK)[0]
    assert all(torch.equal(linear(x_TK[7 - n : 8], weight_NK)[-1], alone) for n in range(8))


@pytest.mark.parametrize("row", [0, 3, 8])
def test_other_rows_may_hold_anything(row):
    x_TK, weight_NK = rows(9, 37), rows(30, 37, seed=1)
    alone = linear(x_TK[row : row + 1], weight_NK)[0]
    for value in (torch.nan, torch.inf, 1e30, 0.0):
        mates_TK = torch.full_like(x_TK, value)
        mates_TK[row] = x_TK[row]
        assert torch.equal(linear(mates_TK, weight_NK)[row], alone)


@pytest.mark.parametrize("width", [1, 5, 37, 64, 300, 5000])
@pytest.mark.parametrize("function", [blocked_exp, tree_sum])
def test_exp_and_sum_give_a_row_the_same_bits_among_any_rows(function, width):
    x_TD = rows(200, width)
    alone = {row: function(x_TD[row : row + 1])[0] for row in WHERE}
    for num_rows in NUM_ROWS:
        for row, place, window in windows(num_rows):
            assert torch.equal(function(x_TD[window])[place], alone[row]), (num_rows, row, place)


@pytest.mark.parametrize("width", [37, 300])
@pytest.mark.parametrize("function", [blocked_exp, tree_sum])
def test_where_a_row_lies_in_memory_does_not_matter(function, width):
    x_TD = rows(200, width)
    strided_TD, apart_TD = x_TD.t().contiguous().t(), x_TD.repeat_interleave(2, 1)[:, ::2]
    assert torch.equal(function(strided_TD), function(x_TD))
    assert torch.equal(function(apart_TD), function(x_TD))


def test_two_threads_give_the_bits_of_one():
    x_TK, weight_NK, wide_TD = rows(200, 129), rows(100, 129, seed=1), rows(3, 70000)
    results, before = [], torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append(
            [
                linear(x_TK, weight_NK),
                tree_sum(wide_TD),
                tree_sum(wide_TD[:1]),
                blocked_exp(wide_TD),
            ]
        )
    torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_the_blocks_compute_what_torch_computes():
    x_TD, weight_ND = rows(9, 37), rows(30, 37, seed=1)
    torch.testing.assert_close(blocked_product(x_TD, weight_ND), x_TD @ weight_ND.T)
    torch.testing.assert_close(tree_sum(x_TD), x_TD.sum(-1, keepdim=True))
    torch.testing.assert_close(blocked_exp(x_TD), x_TD.exp())


# --- whole steps

SHAPES = {
    "plain": {},
    "odd sizes": {"hidden_size": 30, "intermediate_size": 37, "num_heads": 3, "num_kv_heads": 1},
    "experts": {},
}
LENGTHS = [70, 1, 9, 130, 3, 64, 17, 8]
BLOCKS = 3  # of each request
PROMPTS = [
    [(i * 31 + t * t + 7 * t) % 96 for t in range(length)] for i, length in enumerate(LENGTHS)
]


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    if request.param == "experts":
        save("qwen3_moe, a dense layer", directory)
        target = load_target(directory, progress=False)
    else:
        config = changed(tiny_target("qwen3").config, num_layers=3, **SHAPES[request.param])
        target = on_disk(directory, config).loaded
    return target, random_draft(eagle3_config(target, aux_boundaries=(0, 1, 3)))


def start(pair, K):
    sizes = EngineSizes(
        max_model_len=BLOCKS * 64,
        max_num_seqs=len(PROMPTS),
        max_num_batched_tokens=512,
        num_kv_blocks=BLOCKS * len(PROMPTS),
        num_speculative_tokens=K,
    )
    runner = Runner(*pair, sizes, torch.device("cpu"))
    for cache in caches(runner):
        cache.fill_(torch.nan)
    for row in range(len(PROMPTS)):
        runner.start_rows([(row, RowStart(blocks=blocks(row), num_draft_tokens=K))])
    return runner


def blocks(row):
    return range(row * BLOCKS, (row + 1) * BLOCKS)


def part(row, first=0, length=None, prompt=None):
    prompt = prompt or PROMPTS[row]
    return PromptPart(
        state_row=row, prompt=prompt, start=first, length=length or len(prompt), blocks=blocks(row)
    )


def caches(runner):
    return [runner.target_cache] + ([runner.draft_cache] if runner.draft else [])


def cached(runner, row, num_tokens):
    """Keys and values of a request, target and draft: [L, 2, tokens, G, C] each."""
    own = [cache[:, :, list(blocks(row))] for cache in caches(runner)]
    return [kv.transpose(3, 4).flatten(2, 3)[:, :, :num_tokens] for kv in own]


@pytest.mark.parametrize(
    "chunks",
    [
        [[part(row) for row in range(8)]],
        [[part(row) for row in reversed(range(8))]],
        [[part(0), part(3)], [part(1), part(2), part(4)], [part(5), part(6), part(7)]],
        [
            [part(3, 0, 5), part(7)],
            [part(3, 5, 1), part(0, 0, 69)],
            [part(3, 6, 124), part(0, 69, 1)],
        ],
    ],
    ids=["together", "in another order", "in groups", "in pieces"],
)
def test_a_prefill_leaves_the_same_bits_in_any_company(pair, chunks):
    runner, alone = start(pair, 2), start(pair, 2)
    for parts in chunks:
        runner.run_step(parts=parts)
    for row in {each.state_row for parts in chunks for each in parts}:
        alone.run_step(parts=[part(row)])
        for kv, expected in zip(
            cached(runner, row, LENGTHS[row]), cached(alone, row, LENGTHS[row]), strict=True
        ):
            assert torch.equal(kv, expected)
            assert expected.isfinite().all()
        assert torch.equal(runner.state.draft_tokens[row], alone.state.draft_tokens[row])


@pytest.fixture(scope="module")
def greedy(pair):
    """Forty tokens behind each prompt, one at a time."""
    runner = start(pair, 0)
    runner.run_step(parts=[part(row) for row in range(8)])
    written = [tokens[:1] for tokens in runner.read(8).sampled_tokens]
    for _ in range(39):
        runner.run_step(range(8), max_num_computed=180)
        for row, [token] in enumerate(runner.read(8).sampled_tokens):
            written[row].append(token)
    return written


@pytest.mark.parametrize("K", [0, 1, 3, 8])
def test_rounds_leave_the_bits_that_a_prefill_of_their_tokens_leaves(pair, greedy, K):
    runner, alone = start(pair, K), start(pair, K)
    runner.run_step(parts=[part(row) for row in range(8)])
    num_written = [1] * 8
    for round_rows in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 0, 2], [1], [3, 0, 5, 1, 7, 2, 6, 4]):
        for row in round_rows:
            drafts = greedy[row][num_written[row] : num_written[row] + K]
            drafts[row:] = [
                (token + 1) % 96 for token in drafts[row:]
            ]  # row 0 drafts nothing right, row 7 nearly all
            runner.state.draft_tokens[row] = torch.tensor(drafts, dtype=torch.int64)
        runner.run_step(round_rows, max_num_computed=180)
        for row, accepted in zip(
            round_rows, runner.read(len(round_rows)).num_accepted, strict=True
        ):
            assert accepted == min(row, K)
            num_written[row] += accepted + 1
    for row, count in enumerate(num_written):
        committed = PROMPTS[row] + greedy[row][:count]
        alone.run_step(parts=[part(row, prompt=committed[:-1])])
        computed = len(committed) - 1
        for kv, expected in zip(
            cached(runner, row, computed), cached(alone, row, computed), strict=True
        ):
            assert torch.equal(kv, expected)
