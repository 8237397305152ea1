"""kernel == twin, through Triton's interpreter on the CPU and for real on a GPU."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels.attention import launch_plan
from specdec.kernels.attention.arguments import workspace_size
from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.attention.query_rows import QueryRows, plan_tiles
from specdec.kernels.attention.splits import num_splits
from specdec.kernels.attention.twin import paged_attention_ref
from specdec.kernels.best_token import launch_tile_maxima
from specdec.kernels.gate_up import gate_up_ref, launch_gate_up
from specdec.kernels.joint_input import JointNorms, joint_input_of_rows, joint_input_ref
from specdec.kernels.linear import (
    Sums,
    launch_linear,
    launch_split_linear,
    linear_ref,
    split_linear,
)
from specdec.kernels.norms import (
    add_rms_norm,
    add_rms_norm_ref,
    rms_norm,
    rms_norm_ref,
)
from specdec.kernels.rotate_and_store import (
    HeadNorms,
    rotate_and_store,
    rotate_and_store_ref,
)
from specdec.kernels.take_rows import take_rows, take_rows_ref
from specdec.kernels.tile_shapes import rows_of_tiles
from specdec.kernels.tiles import empty_rows, rows_to_read
from tests.specdec.kernels.by_kernel import by_kernel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16]
BF16 = torch.bfloat16
ROW_COUNTS = [1, 3, 17, 70]


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return request.param


def close(actual, expected, dtype):
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("n, k, bias", [(64, 64, False), (100, 96, True), (130, 40, False)])
def test_linear(device, dtype, rows, n, k, bias):
    x, w, b = (
        torch.randn(*shape, device=device, dtype=dtype) for shape in ((rows, k), (n, k), (n,))
    )
    bias_n = b if bias else None
    close(launch_linear(x, w, bias_n, dtype), linear_ref(x, w, bias_n, dtype), dtype)


@pytest.mark.parametrize("rows", [1, 17, 70, 513])
def test_split_linear(device, rows):
    x, w = torch.randn(rows, 2048, device=device), torch.randn(64, 2048, device=device)
    parts = launch_split_linear(x, w)
    assert len(parts) == (1 if rows > 512 else 2)  # of four splits
    sums = Sums(parts, None)
    torch.testing.assert_close(sums.finish(torch.float32), x @ w.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "i, rows, n, first",
    [
        pytest.param(i, *shape, marks=[pytest.mark.slow] * ((i + j) % 2))
        for j, shape in enumerate([(1, 256, 192), (17, 100, 64), (70, 256, 80), (513, 96, 6)])
        for i in range(len(DTYPES))
    ],
)
def test_columns_from_the_first_one_on_have_the_bits_of_all(
    exact_device, monkeypatch, i, rows, n, first
):
    dtype = DTYPES[i]
    x, w = (torch.randn(each, 2048, device=exact_device, dtype=dtype) for each in (rows, n))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: empty(*size, **how).fill_(torch.nan))
    whole, part = (launch_split_linear(x, w, dtype, each) for each in (0, first))
    assert torch.equal(part[..., first:], whole[..., first:])
    assert part[..., :first].isnan().all()


PRODUCTS = {
    "whole": lambda x, w: launch_linear(x, w, None, x.dtype),
    "split": lambda x, w: Sums(launch_split_linear(x, w), None).finish(x.dtype),
    "gate": lambda x, w: launch_gate_up(x, w, None),
    "best": lambda x, w: launch_tile_maxima(x, w).best.amax(0),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_row_of_a_product_has_the_same_bits_among_any_rows(exact_device, kind):
    product = PRODUCTS[kind]
    x, w = (torch.randn(n, 256, device=exact_device) for n in (70, 96))
    whole = product(x, w)
    for first, rows in ((69, 1), (30, 17), (3, 64)):
        part = product(x[first : first + rows].contiguous(), w)
        assert torch.equal(part, whole[first : first + rows]), (first, rows)


@pytest.mark.parametrize("rows", [17, 513])
def test_a_sum_that_is_all_is_rounded_once(device, rows):
    """As its reader would; with splits or a bias the reader has more to add."""
    dtype = torch.float16
    x, w = (torch.randn(n, 2048, device=device, dtype=dtype) for n in (rows, 64))
    found, kept = launch_split_linear(x, w, dtype), launch_split_linear(x, w)
    assert found.dtype == (dtype if len(kept) == 1 else torch.float32)
    assert len(kept) == 1 or rows == 17
    assert kept.dtype == torch.float32
    assert torch.equal(*(Sums(parts, None).finish(dtype) for parts in (found, kept)))
    biased = split_linear(x, w, torch.randn(64, device=device, dtype=dtype))
    assert biased.parts_STN.dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 17, 70, 200])
def test_what_lies_behind_the_rows_of_a_tile_is_read_and_changes_nothing(device, rows):
    shape = rows_of_tiles(rows), 96
    x = torch.full(shape, torch.nan, device=device, dtype=torch.float16)
    x[:rows].normal_()
    w = torch.randn(130, 96, device=device, dtype=torch.float16)
    alone = x[:rows].clone()
    assert (rows_to_read(x[:rows]), rows_to_read(alone)) == (rows_of_tiles(rows), rows)
    assert torch.equal(*(launch_linear(each, w, None, x.dtype) for each in (x[:rows], alone)))
    assert torch.equal(*(launch_gate_up(each, w, None) for each in (x[:rows], alone)))
    found = [launch_tile_maxima(each, w)[:2] for each in (x[:rows], alone)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_no_more_is_read_than_the_storage_has(device):
    whole = torch.zeros(100, 8, device=device)
    assert rows_to_read(whole[:70]) == 100
    assert rows_to_read(whole[90:]) == 10
    assert rows_to_read(whole[80:90, :3]) == 16
    assert rows_to_read(empty_rows(whole, 70, 8)) == 128


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("i, d, bias", [(64, 64, False), (40, 48, True)])
def test_gate_up(device, dtype, rows, i, d, bias):
    x, w, b = (
        torch.randn(*shape, device=device, dtype=dtype)
        for shape in ((rows, d), (2 * i, d), (2 * i,))
    )
    w /= d**0.5  # as models have them: a gate that is large makes any rounding of `up` large
    close(launch_gate_up(x, w, b if bias else None), gate_up_ref(x, w, b if bias else None), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, d", [(1, 64), (3, 100), (17, 33)])
def test_norms(device, dtype, rows, d):
    x, residual = (torch.randn(rows, d, device=device, dtype=dtype) for _ in range(2))
    w, b = (torch.randn(d, device=device, dtype=dtype) for _ in range(2))
    close(by_kernel(rms_norm)(x, w, 1e-5), rms_norm_ref(x, w, 1e-5), dtype)
    for parts, bias, factor in ((1, None, 1.0), (3, b, 1.0), (3, b, 0.22)):
        sums = Sums(torch.randn(parts, rows, d, device=device), bias, factor=factor)
        for actual, expected in zip(
            by_kernel(add_rms_norm)(sums, residual, w, 1e-5),
            add_rms_norm_ref(sums, residual, w, 1e-5),
            strict=True,
        ):
            close(actual, expected, dtype)
        _, stream = add_rms_norm_ref(sums, residual, w, 1e-5)
        close(stream, sums.finish(dtype) * factor + residual, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, d", [(2, 64), (3, 100), (6, 64)])
def test_rows_are_taken_of_queries_and_stream_alike(device, dtype, heads, d):
    q = torch.randn(9, heads, 32, device=device, dtype=dtype)
    stream = torch.randn(9, d + 4, device=device, dtype=dtype)[:, :d]
    rows = torch.tensor([8, 0, 3, 3, 10**6, -1], device=device)  # the last two of padding
    taken = by_kernel(take_rows)(q, stream, rows)
    for each, expected, twin in zip(
        taken,
        (q[[8, 0, 3, 3, 8, 0]], stream[[8, 0, 3, 3, 8, 0]]),
        take_rows_ref(q, stream, rows),
        strict=True,
    ):
        assert torch.equal(each, expected)
        assert torch.equal(twin, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("rows, d", [(1, 64), (17, 100)])
def test_a_joint_input_is_two_norms_side_by_side(device, dtype, has_rows, rows, d):
    table, features = (torch.randn(n, d, device=device, dtype=dtype) for n in (50, rows + 3))
    weights = [torch.randn(d, device=device, dtype=dtype) for _ in range(2)]
    ids = torch.randint(50, (rows,), device=device)
    picked = torch.randperm(rows + 3, device=device)[:rows] if has_rows else None
    features = features if has_rows else features[:rows]
    given = ids, table, features, JointNorms(*weights, 1e-6), picked
    joined, found = by_kernel(joint_input_of_rows)(*given)
    expected = features if picked is None else features[picked]
    assert torch.equal(found, expected)
    halves = [by_kernel(rms_norm)(table[ids], weights[0], 1e-6)]
    halves.append(by_kernel(rms_norm)(expected, weights[1], 1e-6))
    assert torch.equal(joined, torch.cat(halves, dim=-1))
    close(joined, joint_input_ref(*given)[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "has_bias, has_norms, C",
    [(False, False, 16), (True, True, 16), (True, True, 96), (False, True, 80), (True, False, 6)],
)
def test_rotate_and_store(device, dtype, has_bias, has_norms, C):
    T, H, G, S, N = 7, 4, 2, 64, 3
    norms = (
        HeadNorms(*(torch.randn(C, device=device, dtype=dtype) for _ in range(2)), 1e-5)
        if has_norms
        else None
    )
    bias = torch.randn((H + 2 * G) * C, device=device, dtype=dtype) if has_bias else None
    qkv = Sums(torch.randn(2, T, (H + 2 * G) * C, device=device), bias)
    rope = (
        torch.randn(300, C // 2, device=device).cos(),
        torch.randn(300, C // 2, device=device).sin(),
    )
    positions = torch.tensor([0, 5, 63, 64, 199, 0, 0], device=device)
    slots = torch.tensor([0, 5, 63, 64, 130, -1, -1], device=device)
    caches = [
        torch.full((2, N + 1, G, S, C), torch.nan, dtype=dtype, device=device) for _ in range(2)
    ]
    actual = by_kernel(rotate_and_store)(qkv, rope, norms, (positions, slots), caches[0])
    expected = rotate_and_store_ref(qkv, rope, norms, (positions, slots), caches[1])
    close(actual, expected, dtype)
    torch.testing.assert_close(
        caches[0][:, :N], caches[1][:, :N], rtol=2e-2, atol=2e-2, equal_nan=True
    )
    assert caches[0][:, N].isnan().all()  # padding writes nothing at all

    qkv.parts_STN[..., : H * C] = torch.nan
    without = torch.full_like(caches[0], torch.nan)
    by_kernel(rotate_and_store)(qkv, rope, norms, (positions, slots), without, has_queries=False)
    assert torch.equal(without.nan_to_num(7.0), caches[0].nan_to_num(7.0))


def attention_case(lengths, query_lens, H, G, C, device, dtype):
    """Requests of these context lengths, queried by their last rows; unwritten slots are NaN."""
    S, M = 64, -(-max(lengths) // 64)
    cache = torch.full((2, len(lengths) * M + 1, G, S, C), torch.nan, dtype=dtype, device=device)
    table = torch.randperm(len(lengths) * M, device=device).view(len(lengths), M)
    table = torch.cat([table, torch.full((1, M), len(lengths) * M, device=device)])
    for b, length in enumerate(lengths):
        position = torch.arange(length, device=device)
        cache.transpose(2, 3)[:, table[b, position // S], position % S] = torch.randn(
            2, length, G, C, device=device, dtype=dtype
        )
    positions = torch.cat(
        [torch.arange(n - q, n, device=device) for n, q in zip(lengths, query_lens, strict=True)]
    )
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], device=device)
    rows = QueryRows(
        block_table=table,
        idx_mapping=torch.arange(len(lengths), device=device),
        positions=positions,
        query_start_loc=None if len(set(query_lens)) == 1 else starts,
        max_query_len=max(query_lens),
        max_seq_len=max(lengths),
        tiles=plan_tiles(query_lens, len(positions), torch.device(device)),
    )
    q = torch.randn(len(positions), H, C, device=device, dtype=dtype)
    return q, cache, rows


CONTEXTS = [
    ((1,), (1,)),
    ((63, 100), (6, 6)),
    ((129, 3, 64), (1, 1, 1)),
    ((90, 20, 41), (90, 7, 33)),
    ((1100,), (4,)),
]
HEADS = [(4, 2, 16), (7, 1, 16), (2, 1, 96)]


@pytest.mark.parametrize(
    "i, j, n",
    [
        # of the third that is not slow, each context and each kind of heads has each dtype
        pytest.param(i, j, n, marks=[pytest.mark.slow] * ((i + j + n) % 3 > 0))
        for i, j, n in itertools.product(range(5), range(3), range(len(DTYPES)))
    ],
)
def test_paged_attention(device, i, j, n):
    (lengths, query_lens), (H, G, C), dtype = CONTEXTS[i], HEADS[j], DTYPES[n]
    q, cache, rows = attention_case(lengths, query_lens, H, G, C, device, dtype)
    actual, expected = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
    launch_paged_attention(q, actual, cache, rows)
    paged_attention_ref(q, expected, cache, rows)
    close(actual, expected, dtype)


@pytest.mark.parametrize(
    "context", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2, 4))]
)
def test_scores_may_have_another_scale(device, context):
    """Queries of twice the size and half the scale have the same scores; others have not."""
    (lengths, query_lens), (H, G, C) = CONTEXTS[context], HEADS[0]
    q, cache, rows = attention_case(lengths, query_lens, H, G, C, device, torch.float32)
    usual, scaled, other = (torch.full_like(q, torch.nan) for _ in range(3))
    for how in (launch_paged_attention, paged_attention_ref):
        how(q, usual, cache, rows)
        how(2 * q, scaled, cache, rows, C**-0.5 / 2)
        how(q, other, cache, rows, C**-0.5 / 2)
        assert torch.equal(usual, scaled)
        assert not torch.allclose(usual, other)


@pytest.mark.parametrize(
    "dtype, H, G, C",
    [
        (torch.float32, 2, 1, 16),
        pytest.param(torch.float16, 2, 1, 16, marks=pytest.mark.slow),
        (BF16, 32, 8, 128),
        (BF16, 8, 4, 96),
    ],
)
def test_a_round_and_a_chunk_give_a_row_the_same_bits(exact_device, dtype, H, G, C):
    if exact_device == "cpu" and dtype == BF16:
        pytest.skip("the interpreter's bfloat16 product is wrong")
    case = attention_case((300,), (300,), H, G, C, exact_device, dtype)
    assert places_that_differ(launch_paged_attention, *case) == []


@pytest.mark.parametrize("dtype, H, G, C", [(torch.float32, 2, 1, 16), (BF16, 8, 4, 96)])
def test_a_round_and_a_chunk_give_a_row_the_same_bits_by_the_twin(dtype, H, G, C):
    torch.manual_seed(0)
    case = attention_case((300,), (300,), H, G, C, "cpu", dtype)
    assert places_that_differ(paged_attention_ref, *case) == []


def places_that_differ(attend, q, cache, rows):
    """First row and number of the rounds whose rows have other bits than those of a chunk."""
    chunk = torch.full_like(q, torch.nan)
    attend(q, chunk, cache, rows)
    differ = []
    for first, length in (
        (299, 1),
        (127, 3),
        (128, 1),
        (250, 6),
        (200, 4),
        (60, 9),
        (290, 10),
        (63, 2),
    ):
        here = slice(first, first + length)
        few = QueryRows(
            block_table=F.pad(rows.block_table, (0, 11), value=5),  # for 1,000 keys
            idx_mapping=rows.idx_mapping,
            positions=rows.positions[here],
            query_start_loc=None,
            max_query_len=length,
            max_seq_len=1000,
            tiles=plan_tiles([length], length, q.device),
        )
        out = torch.full_like(q[here], torch.nan)
        attend(q[here].contiguous(), out, cache, few)
        if not torch.equal(out, chunk[here]):
            differ.append((first, length))
    return differ


@pytest.mark.parametrize("query_len", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_enough_requests_share_no_splits_and_keep_their_bits(exact_device, query_len, monkeypatch):
    device = exact_device
    dtype = torch.float32 if device == "cpu" else BF16
    H, G = (4, 1) if device == "cpu" else (8, 2)
    q, cache, rows = attention_case((300, 64, 1100), (query_len,) * 3, H, G, 32, device, dtype)
    last = rows.block_table[rows.idx_mapping[2], 1099 // 64]
    cache[1, last] *= 50  # or 12 keys of 1,100 would not show
    outs, spaces = [], []
    for full in (1 << 30, 1):
        monkeypatch.setattr(launch_plan, "FULL", full)
        space = torch.full((workspace_size(len(q), H, 32, 1100),), torch.nan, device=device)
        outs.append(torch.full_like(q, torch.nan))
        launch_paged_attention(q, outs[-1], cache, replace(rows, workspace=space))
        spaces.append(space)
    assert not spaces[0].isnan().all()
    assert spaces[1].isnan().all()  # one program keeps what it has seen to itself
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    "keys, count",
    [
        (1, 1),
        (64, 1),
        (65, 2),
        (1024, 16),
        (1025, 17),
        (1153, 18),
        (4096, 40),
        (4097, 41),
        (4353, 42),
        (8192, 56),
        (8193, 57),
        (8705, 58),
    ],
)
def test_splits_cover_the_context(keys, count):
    assert num_splits(keys) == count
