"""What ranks do in tests of the exchange alone: they read sums of which each has a part."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.linear import Sums
from specdec.kernels.norms import add, add_rms_norm
from specdec.parallel.exchange import Exchange
from specdec.parallel.transfers import deal, gather
from weights.shard import Shard

BORDER = 16  # rows
D, EPS, SLOTS = 24, 1e-5, 3


def exchange_of(shard: Shard, group: str, width: int = D) -> Exchange:
    """Make a rank's end, where BORDER rows are the most that are gathered whole."""
    n = shard.size
    exchange = Exchange(shard, group, BORDER * width * (n - 1) * (2 * n - 3) // (2 * n))
    assert exchange.are_few(BORDER, width)
    assert not exchange.are_few(BORDER + 1, width)
    return exchange


@dataclass(frozen=True)
class Case:
    """What is read: products of columns, or results of experts."""

    num_rows: int
    dtype: torch.dtype
    has_bias: bool = False
    has_tap: bool = False
    factor: float = 1.0
    num_experts: int = 0  # 0: a product


def numbers(case: Case, name: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + case.num_rows)
    return torch.randn(shape, generator=generator)


def parts_of(case: Case, size: int, layer: int) -> Tensor:
    """All ranks' parts: [n, 1, T, D] float32, or of experts [n, k, T, D], NaN where none is."""
    T = case.num_rows
    if case.num_experts == 0:
        return numbers(case, f"parts {layer}", size, 1, T, D)
    own = numbers(case, f"parts {layer}", SLOTS, T, D).to(case.dtype)
    is_on = (chosen(case) // (case.num_experts // size)).t()[..., None]
    return torch.stack([own.where(is_on == rank, torch.nan) for rank in range(size)])


def merged(case: Case, parts_NSTD: Tensor) -> Tensor:
    """Return the parts as one process has them: of each slot the one that is there."""
    return parts_NSTD.nan_to_num(0).sum(0) if case.num_experts else parts_NSTD[:, 0]


def chosen(case: Case) -> Tensor:
    """Experts by row and slot; the last row is padding."""
    order = numbers(case, "ids", case.num_rows, case.num_experts).argsort(1)
    order[-1] = case.num_experts
    return order[:, :SLOTS]


def sums_of(case: Case, parts_STD: Tensor, places_TS: Tensor | None = None) -> Sums:
    if case.num_experts == 0:
        bias_D = numbers(case, "bias", D).to(case.dtype) if case.has_bias else None
        return Sums(parts_STD, bias_D, factor=case.factor)
    weights_TS = numbers(case, "weights", case.num_rows, SLOTS).exp()
    weights_TS[-1] = 0
    return Sums(parts_STD, None, weights_TS, case.factor, places_TS)


def places_of(case: Case, size: int) -> Tensor:
    ids_TS = chosen(case)
    owner_TS = (ids_TS // (case.num_experts // size)).where(ids_TS < case.num_experts, 0)
    return (owner_TS * SLOTS + torch.arange(SLOTS)).int()


def read_alone(case: Case, size: int) -> list[Tensor]:
    """Read two layers' sums in one process; the second has the first one's stream."""
    stream_TD = numbers(case, "stream", case.num_rows, D).to(case.dtype)
    weight_D = numbers(case, "weight", D).to(case.dtype)
    found = []
    for layer in range(2):
        sums = sums_of(case, merged(case, parts_of(case, size, layer)))
        normed_TD, stream_TD = add_rms_norm(sums, stream_TD, weight_D, EPS)
        found += [normed_TD, stream_TD]
    if case.factor == 1.0:
        add(sums, stream_TD, out := torch.empty_like(stream_TD))
        found.append(out)
    return found


def read_together(shard: Shard, group: str, case: Case) -> list[Tensor]:
    """Read them as a rank: the first layer may leave a share of the stream."""
    exchange = exchange_of(shard, group)
    stream_TD = numbers(case, "stream", case.num_rows, D).to(case.dtype)
    weight_D = numbers(case, "weight", D).to(case.dtype)
    places_TS = places_of(case, shard.size) if case.num_experts else None
    found = []
    for layer, read in enumerate((exchange.add_to_share, exchange.add_rms_norm)):
        tap_TD = stream_TD.new_zeros(case.num_rows, 2 * D)[:, :D] if case.has_tap else None
        sums = sums_of(case, parts_of(case, shard.size, layer)[shard.rank], places_TS)
        normed_TD, stream_TD = read(sums, stream_TD, weight_D, EPS, tap_TD)
        is_share = layer == 0 and case.num_rows > BORDER and not case.has_tap
        each = -(-case.num_rows // shard.size)
        first = shard.rank * each if is_share else 0
        last = min(first + each, case.num_rows) if is_share else case.num_rows
        assert len(stream_TD) == last - first, (len(stream_TD), first, last)
        # a share is compared by its place among all rows
        whole_TD = torch.full_like(normed_TD, torch.nan)
        whole_TD[first:last] = stream_TD
        assert tap_TD is None or torch.equal(tap_TD, whole_TD)
        found += [normed_TD, whole_TD]
    if case.factor == 1.0:
        exchange.add(sums, stream_TD, out := torch.empty_like(stream_TD))
        found.append(out)
    return found


def move(shard: Shard, group: str) -> tuple[Tensor, Tensor]:
    """Gather rank numbers, and deal rows 10 r + t of rank r: two to rank 0, one to others."""
    gathered = torch.empty(shard.size, 1)
    gather(torch.tensor([float(shard.rank)]), gathered, group)
    lengths = [2, *[1] * (shard.size - 1)]
    own_TD = 10.0 * shard.rank + torch.arange(shard.size + 1)[:, None]
    dealt = torch.empty(shard.size, lengths[shard.rank], 1)
    deal(own_TD, dealt, lengths, group)
    return gathered, dealt


def gather_all(shard: Shard, group: str, tensor: Tensor) -> Tensor:
    """Gather a tensor that is no block of memory, of which each rank has other rows."""
    exchange = exchange_of(shard, group)
    return exchange.gather(tensor.roll(shard.rank, 0).t())


def look_up(shard: Shard, group: str, table_VD: Tensor, ids_T: Tensor) -> Tensor:
    mine = shard.ids_of(len(table_VD))
    exchange = exchange_of(shard, group, table_VD.shape[1])
    return exchange.embed(ids_T, table_VD[mine.start : mine.stop].clone(), mine.start)
