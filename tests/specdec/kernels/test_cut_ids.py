"""A vocabulary that is cut: every result is that of one rank, bit for bit, by kernel and twin."""

import os
import subprocess
import sys

import pytest
import torch

from specdec.kernels import best_token, block_sums, choose_token, mask_rows, support_floor
from specdec.kernels.best_children import Perturbation, launch_best_children
from specdec.kernels.best_token import NO_TOKEN, NOT_FINITE, StopMask, confidence_ref, join_tiles
from specdec.kernels.choose_token import NoiseKeys, launch_choices
from specdec.kernels.cut_ids import tile_columns_of
from specdec.kernels.gumbel import TARGET
from specdec.kernels.support_floor import Limits
from specdec.rounds.rank import best_of_all, log_probs
from specdec.sampler.sampler import probabilities
from tests.specdec.fake_ranks import FakeRanks

SMALL = [(96, 2), (96, 4), (96, 8), (1000, 4)]  # the last: of unequal parts
CUTS = [*SMALL, (5000, 8)]
LARGE = [(49_155, 8), (128_256, 4), (151_936, 8)]
CASES = [("kernel", 96, 8), *(("twin", *cut) for cut in (*CUTS, *LARGE))]
CASES.append(pytest.param("kernel", 1000, 4, marks=pytest.mark.slow))
MODULES = (best_token, choose_token, block_sums, mask_rows, support_floor)


@pytest.fixture
def way(request, monkeypatch):
    """Take the kernel or the twin, in all threads."""
    for module in MODULES:
        monkeypatch.setattr(module, "use_triton", lambda _: request.param == "kernel")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")


def logits_of(vocab_size):
    """Ties between and within ranks, masked parts, rows without a choice, what is not finite."""
    logits = torch.randint(-3, 4, (9, vocab_size)).float()
    logits[1] = 4 * torch.randn(vocab_size)
    logits[2, : vocab_size // 2] = -torch.inf
    logits[3] = -torch.inf
    logits[4, vocab_size - 2] = torch.nan
    logits[5, vocab_size // 3] = torch.inf
    logits[6] = torch.where(torch.rand(vocab_size) < 0.99, -torch.inf, torch.randn(vocab_size))
    logits[7] = 0.3 * torch.randn(vocab_size) - 100
    return logits


def keys_of(num_rows, **more):
    values = {
        "temperatures": torch.tensor([0.7, 0.0, 1.0, 1.3])[torch.arange(num_rows) % 4],
        "seeds": torch.randint(0, 2**32, (num_rows, 2)),
        "positions": torch.arange(num_rows),
        "epochs": torch.zeros(num_rows, dtype=torch.int64),
        "stream": TARGET,
    }
    return NoiseKeys(**values | more)


def on_ranks(size, vocab_size, function, logits, *others):
    """Call function(columns, *others, cut) on every rank; all ranks return the same."""

    def of_rank(rank):
        cut = rank.cut(vocab_size)
        return function(logits[..., cut.ids.start : cut.ids.stop].contiguous(), *others, cut)

    ranks = FakeRanks(size)
    first, *rest = ranks.run(of_rank)
    for each in rest:
        assert_equal(each, first)
    return first, ranks


def assert_equal(ours, theirs):
    if isinstance(theirs, tuple):
        for mine, other in zip(ours, theirs, strict=True):
            assert_equal(mine, other)
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def chosen(logits, floor, keys, cut):
    out = torch.full((len(logits), 2), -999)
    choose_token.choose_token(logits, floor, keys, out[:, 1], cut)
    assert (out[:, 0] == -999).all()
    return out[:, 1]


@pytest.mark.parametrize("way, vocab_size, size", CASES, indirect=["way"])
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("has_ids", [False, True])
def test_the_chosen_tokens_are_those_of_one_rank(vocab_size, size, has_ids):
    logits = logits_of(vocab_size)
    ids = torch.randperm(2 * vocab_size)[:vocab_size].sort().values if has_ids else None
    keys = keys_of(len(logits), token_ids=ids)
    floor = torch.full((len(logits),), -torch.inf)
    floor[1] = 2.0
    whole = chosen(logits, floor, keys, None)
    found, ranks = on_ranks(size, vocab_size, chosen, logits, floor, keys)
    assert torch.equal(found, whole)
    assert whole[3:6].tolist() == [NO_TOKEN, NOT_FINITE, NOT_FINITE]
    assert len(set(whole.tolist())) > 4
    assert ranks.most_numbers == 2 * len(logits)


@pytest.mark.parametrize("way", ["kernel", "twin"], indirect=True)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("vocab_size, size", [*SMALL, (3000, 4)])
def test_greedy_tokens_and_their_stop_ids_are_those_of_one_rank(vocab_size, size):
    x, weight = (torch.randint(-3, 4, (n, 64)).float() for n in (6, vocab_size))
    weight[1::2] = weight[: vocab_size // 2].clone()  # ties
    weight[-1] = weight[0]
    best = (x @ weight.T).argmax(dim=1)
    mask = StopMask(
        positions=torch.full((6,), 10),
        states=torch.tensor([0, 1, 2, 0, 1, -1]),
        min_positions=torch.tensor([20, 20, 0, 0]),
        stop_ids=torch.stack([best[:4], best[:4], torch.full((4,), vocab_size - 1)], dim=1),
    )

    def greedy(weight_DV, cut):
        out = torch.full((6,), -999)
        best_token.best_token(x, weight_DV.T.contiguous(), out, mask, 0.5, cut)
        return out

    whole = greedy(weight.T, None)
    assert (whole[:2] != best[:2]).all()
    assert (whole[2:4] == best[2:4]).any()
    assert torch.equal(on_ranks(size, vocab_size, greedy, weight.T)[0], whole)


LIMITS = [
    *((0, k, 1.0) for k in (1, 40, 70_000)),
    *((0, 0, p) for p in (1e-6, 0.9, 0.9999)),
    *((0.02, 0, 1.0), (1.0, 0, 1.0), (0.001, 50, 0.95), (0, 30, 0.5), (0, 0, 1.0)),
]


def limits_of(num_rows, shift):
    which = (torch.arange(num_rows) + shift) % len(LIMITS)
    min_p, top_k, top_p = (torch.tensor(column)[which] for column in zip(*LIMITS, strict=True))
    temperatures = torch.full((num_rows,), 0.7)
    temperatures[-1] = 0.0  # padding
    return Limits(temperatures, min_p.log(), top_k, top_p)


@pytest.mark.parametrize("way, vocab_size, size", CASES, indirect=["way"])
@pytest.mark.usefixtures("way")
def test_the_floor_is_that_of_one_rank(vocab_size, size):
    logits = logits_of(vocab_size)[[1, 0, 3, 5, 7, 6, 8] if vocab_size > 96 else [7, 0, 1, 8]]
    floor = support_floor.support_floor
    for shift in range(0, len(LIMITS), 3) if vocab_size == 96 and size == 2 else (2,):
        limits = limits_of(len(logits), shift)
        whole = floor(logits, limits)
        found, ranks = on_ranks(size, vocab_size, floor, logits, limits)
        assert torch.equal(found, whole)
        assert (whole > -torch.inf).sum() > 1
        assert ranks.most_numbers <= 256 * len(logits)


@pytest.mark.parametrize("way, vocab_size, size", CASES, indirect=["way"])
@pytest.mark.usefixtures("way")
def test_sums_over_ids_are_those_of_one_rank(vocab_size, size):
    logits = logits_of(vocab_size)
    scale = torch.linspace(0.5, 2.0, len(logits))
    for function in (
        lambda x, cut: block_sums.sum_over_ids(x.nan_to_num(0, 1, 1), cut),
        lambda x, cut: confidence_ref(x, scale, cut),
        lambda x, cut: best_of_all(log_probs(x, cut), 5, cut),
    ):
        assert_equal(on_ranks(size, vocab_size, function, logits)[0], function(logits, None))
    whole = probabilities(logits)

    def shares(x, cut):
        return cut.joined(probabilities(x, cut), 1)

    assert torch.equal(on_ranks(size, vocab_size, shares, logits)[0], whole)
    assert ((whole.sum(dim=1) - 1).abs() < 1e-5).sum() == 6


@pytest.mark.parametrize(
    "vocab_size, size", [(1000, 4), pytest.param(5000, 8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("is_drawn", [False, True])
def test_tiles_of_drafts_lie_as_on_one_rank(vocab_size, size, is_drawn):
    logits = logits_of(vocab_size)[::4]
    keys = keys_of(len(logits))
    noise = Perturbation(torch.full((len(logits),), -torch.inf), keys)

    def tiles(x, cut):
        maxima = launch_choices(x, noise.floor_X, keys, True, cut)
        return join_tiles(maxima, cut, tile_columns_of(x, cut))

    def children(x, cut):
        return launch_best_children(x, 4, noise if is_drawn else None, cut)

    for function in (tiles, children):
        assert_equal(on_ranks(size, vocab_size, function, logits)[0], function(logits, None))


@pytest.mark.parametrize("way", ["kernel", "twin"], indirect=True)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("vocab_size, size", CUTS)
def test_a_grammars_bits_are_cut_where_ids_are(vocab_size, size):
    logits = logits_of(vocab_size)
    row_X = torch.tensor([7, -1, 0, 4])
    bits_XW = torch.randint(-(2**31), 2**31, (4, -(-vocab_size // 32))).int()

    def masked(x, first):
        x = x.clone()
        mask_rows.mask_rows(x, row_X, bits_XW, first)
        return x

    def of_rank(x, cut):
        return cut.joined(masked(x, cut.first), 1)

    whole = masked(logits, 0)
    assert not torch.equal(whole[0], logits[0])
    assert_equal(on_ranks(size, vocab_size, of_rank, logits)[0], whole)


@pytest.mark.slow
def test_they_compile_without_a_gpu():
    """In a process without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.specdec.kernels.compile_cut_ids"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 14
