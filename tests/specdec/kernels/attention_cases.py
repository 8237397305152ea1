"""Requests over a paged cache, asked by their last rows, for kernels of attention."""

import torch
from torch import Tensor

from specdec.kernels import jit, tl
from specdec.kernels.attention.query_rows import QueryRows

S = 64
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def output(how, q: Tensor, cache: Tensor, rows: QueryRows) -> Tensor:
    """What a function of attention writes, into NaN; the row after its own stays NaN."""
    out = q.new_full((len(q) + 1, *q.shape[1:]), torch.nan)
    how(q, out, cache, rows)
    assert out[-1].isnan().all()
    return out[:-1]


def launches_of(rows: QueryRows) -> list:
    """The kernels that were prepared for layers of one kind."""
    [launches] = rows.launches.values()
    return launches


def values(kind: str, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Of q, k or v."""
    x = torch.randn(*shape, device=device)
    tiny = 2e-7 if dtype == FP16 else 1e-39  # subnormal in the cache's type
    scales = {"large": 30.0, "small": 1e-3, "subnormal": tiny}
    if kind == "positive":
        x = x.abs()
    if kind == "cancelling":
        x = x + 100.0 * torch.randint(0, 2, shape, device=device).mul(2).sub(1)
    return (x * scales.get(kind, 1.0)).to(dtype)


def case(kind, extents, *, group, G, C, dtype, device) -> tuple[Tensor, Tensor, QueryRows]:
    """Requests of these lengths, asked by their last rows; unwritten slots are NaN."""
    lengths, query_lens = extents
    M = -(-max(lengths) // S)
    num_blocks = len(lengths) * M
    how = {"dtype": dtype, "device": device}
    cache = torch.full((2, num_blocks + 1, G, S, C), torch.nan, **how)
    table = torch.randperm(num_blocks, device=device).view(-1, M)
    for row, length in zip(table, lengths, strict=True):
        kv = values(kind, 2, M * S, G, C, **how).unflatten(1, (M, S)).transpose(2, 3)
        cache[:, row] = kv
        cache[:, row[-(-length // S) :]] = torch.nan
        cache[:, row[(length - 1) // S], :, (length - 1) % S + 1 :] = torch.nan
    ends = zip(lengths, query_lens, strict=True)
    positions = [position for end, count in ends for position in range(end - count, end)]
    starts = [sum(query_lens[:b]) for b in range(len(lengths) + 1)]
    rows = QueryRows(
        block_table=torch.cat([table, torch.full((1, M), num_blocks, device=device)]),
        idx_mapping=torch.arange(len(lengths), device=device),
        positions=torch.tensor(positions, device=device),
        query_start_loc=None if len({*query_lens}) == 1 else torch.tensor(starts, device=device),
        max_query_len=max(query_lens),
        max_seq_len=max(lengths),
    )
    return values(kind, len(positions), G * group, C, **how), cache, rows


@jit
def load_part(parts, index, c, C: tl.constexpr):
    """The partial result of this index of a row: peak [1], total [1], values [1, columns c]."""
    acc_ptr, stats_ptr, row = parts
    at = row + index + tl.arange(0, 1)
    peak, total = tl.load(stats_ptr + at * 2), tl.load(stats_ptr + at * 2 + 1)
    return peak, total, tl.load(acc_ptr + at[:, None] * C + c[None, :])
