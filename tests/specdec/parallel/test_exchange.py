"""Readers of sums of which each rank has a part return the bits of one process that has all."""

import pytest
import torch

from specdec.kernels import active_mode, setting
from specdec.kernels.linear import Sums
from specdec.kernels.norms import add_rms_norm
from specdec.kernels.sum_order import add_parts
from specdec.parallel import exchange as module
from specdec.parallel.exchange import Exchange
from tests.specdec.fake_ranks import FakeRanks
from tests.specdec.parallel.reads import (
    BORDER,
    EPS,
    Case,
    D,
    exchange_of,
    gather_all,
    look_up,
    merged,
    move,
    numbers,
    parts_of,
    read_alone,
    read_together,
    sums_of,
)
from weights.shard import Shard

ROWS = [1, BORDER, BORDER + 1, 39, 64]
KINDS = {
    "a product": {},
    "a bias": {"has_bias": True},
    "taps and a factor": {"has_tap": True, "factor": 0.7},
    "experts": {"num_experts": 8},
    "experts and taps": {"num_experts": 8, "has_tap": True, "factor": 0.7},
}
DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_ranks_read_what_one_process_reads(ranks, kind, num_rows):
    for dtype in DTYPES:
        case = Case(num_rows, dtype, **KINDS[kind])
        expected = read_alone(case, ranks.size)
        for found in ranks.run(read_together, case):
            for one, other in zip(found, expected, strict=True):
                is_mine_T1 = ~one.isnan().any(1, keepdim=True)  # of a stream that is a share
                assert torch.equal(one.where(is_mine_T1, 0), other.where(is_mine_T1, 0))


@pytest.mark.parametrize("num_rows", [1, 39])
def test_every_row_of_a_shared_stream_is_some_ranks(ranks, num_rows):
    case = Case(num_rows, torch.float32)
    streams = [found[1] for found in ranks.run(read_together, case)]
    held = sum((~stream.isnan().any(1)).long() for stream in streams)
    assert held.tolist() == [ranks.size if num_rows <= BORDER else 1] * num_rows


def test_the_order_of_parts_and_slots_shows():
    """Otherwise equal bits would say nothing about it."""
    for case in (Case(64, torch.float32), Case(64, torch.float32, num_experts=8)):
        parts_STD = merged(case, parts_of(case, 4, 0))
        order = [0, 2, 1, 3][: len(parts_STD)]
        one, other = (sums_of(case, each) for each in (parts_STD, parts_STD[order]))
        if case.num_experts:
            other = other._replace(weights_TS=other.weights_TS[:, order])
        assert torch.allclose(one.finish(torch.float32), other.finish(torch.float32), atol=1e-4)
        assert not torch.equal(one.finish(torch.float32), other.finish(torch.float32))


def test_transfers_move_rows_by_rank(ranks):
    n = ranks.size
    row = 0
    for rank, (gathered, dealt) in enumerate(ranks.run(move)):
        rows = 2 if rank == 0 else 1
        assert gathered[:, 0].tolist() == list(range(n))
        expected = [[10 * other + row + i for i in range(rows)] for other in range(n)]
        assert dealt[..., 0].tolist() == expected
        row += rows


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float32]
)
def test_tensors_of_any_dtype_are_gathered_by_rank(ranks, dtype):
    tensor = torch.arange(12).view(4, 3).fmod(5).to(dtype)
    expected = torch.stack([tensor.roll(rank, 0).t() for rank in range(ranks.size)])
    for found in ranks.run(gather_all, tensor):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("num_rows", [2, BORDER, 39])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_have_the_bits_of_the_table(ranks, num_rows, dtype):
    table_VD = torch.randn(97, 8).to(dtype)
    table_VD[5], table_VD[96] = -0.0, torch.inf
    ids_T = torch.arange(num_rows) * 7 % 97
    ids_T[0], ids_T[-1] = 5, 96
    for found in ranks.run(look_up, table_VD, ids_T):
        assert torch.equal(found, table_VD[ids_T])
        assert torch.equal(found.signbit(), table_VD[ids_T].signbit())


def test_a_rank_that_only_compiles_waits_for_no_other():
    exchange = Exchange(Shard(0, 2), "no group", 0)
    sums = Sums(torch.randn(1, BORDER + 1, 8), None)
    stream_TD = torch.zeros(BORDER + 1, 8)
    with setting(active_mode, object()):
        normed_TD, _ = exchange.add_rms_norm(sums, stream_TD, torch.ones(8), 1e-5, None)
        assert exchange.gather(stream_TD).shape == (2, BORDER + 1, 8)
    assert normed_TD.shape == stream_TD.shape
    with pytest.raises(RuntimeError, match="no group"):
        exchange.gather(stream_TD)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_is_dealt_some_rows(size):
    exchanges = [Exchange(Shard(rank, size), "none", 0) for rank in range(size)]
    dealt = [rows for rows in range(1, 99) if not exchanges[0].are_few(rows, 8)]
    assert len(dealt) == 98 - (size - 1) ** 2
    for num_rows in dealt:
        shares = [exchange.share(num_rows) for exchange in exchanges]
        assert min(map(len, shares)) > 0
        assert [t for share in shares for t in share] == list(range(num_rows))


def push_all(own_PX, out_nX, rank):
    out_nX.copy_(rank.gather(add_parts(own_PX)))


def push_rows(own_TD, out_nRD, rank, num_rows):
    mine = slice(rank.rank * num_rows, (rank.rank + 1) * num_rows)
    out_nRD.copy_(rank.gather(own_TD)[:, mine])


@pytest.mark.parametrize(
    "num_parts, num_rows", [*((1, T) for T in (1, BORDER, BORDER + 1, 39)), (2, 1), (2, BORDER)]
)
def test_parts_that_gpus_push_are_added_in_the_order_of_all(monkeypatch, num_rows, num_parts):
    """By kernels of push.py in place of a library; of many rows there is one part."""
    for each in (push_all, push_rows):
        monkeypatch.setattr(module, each.__name__, each)
    case = Case(num_rows, torch.float32)
    parts_STD = numbers(case, "all parts", 2 * num_parts, num_rows, D)
    stream_TD, weight_D = numbers(case, "stream", num_rows, D), numbers(case, "weight", D)

    def read(rank):
        border = exchange_of(Shard(rank.rank, 2), "none").border
        exchange = Exchange(Shard(rank.rank, 2), "none", border, boxes=rank)
        own_PTD = parts_STD[num_parts * rank.rank :][:num_parts]
        return exchange.add_rms_norm(Sums(own_PTD, None), stream_TD, weight_D, EPS, None)

    expected = add_rms_norm(Sums(parts_STD, None), stream_TD, weight_D, EPS)
    for found in FakeRanks(2).run(read):
        assert all(map(torch.equal, found, expected))
