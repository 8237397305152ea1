"""What the ranks of a model exchange: parts of sums, experts' results and rows of embeddings.

A product whose columns are cut leaves one float32 part on each rank. The reader that adds a
product's splits (kernels/norms.py) adds these too, in the order of ranks, so a rank has the sum of
a whole weight: nothing is added on the way.

Few rows: every rank gathers all parts and reads all rows. Many: each rank is dealt its share of the
rows, a block of neighbours, and reads these; then the normed rows are gathered, rounded as they
are. The residual stream stays a share until somebody else reads it. Both ways give the same bits.

Letters: T rows, D hidden, n ranks, R rows of this rank's share, k experts a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import only_compiles
from specdec.kernels.cut_table import BITS, own_rows, rows_of_all
from specdec.kernels.linear import Sums
from specdec.kernels.norms import add, add_rms_norm
from specdec.kernels.tiles import empty_rows
from specdec.parallel.transfers import deal, gather
from weights.shard import Shard

MIXING = 0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64)  # odd


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's end. Results are new tensors, so graphs that capture them keep their places.

    group:  the name of the ranks' process group, as torch.distributed knows it
    border: the most rows that are gathered whole; at least (n - 1)^2, so that more rows give each
            rank some
    poisons: fills what is received with NaN before, for debugging
    """

    shard: Shard
    group: str
    border: int
    poisons: bool = False

    def __post_init__(self) -> None:
        least = (self.shard.size - 1) ** 2
        assert self.shard.size > 1, "one rank has nobody to exchange with"
        assert self.border >= least, f"{self.border} rows gathered at most, give at least {least}"

    def add_rms_norm(
        self, x: Sums, residual_TD: Tensor, weight_D: Tensor, eps: float, tap_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Finish a product of all ranks and do what norms.add_rms_norm does.

        residual: the stream, of all rows or of this rank's share
        """
        return self._read(x, residual_TD, weight_D, eps, tap_TD, is_whole=True)

    def add_to_share(
        self, x: Sums, residual_TD: Tensor, weight_D: Tensor, eps: float, tap_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Do what add_rms_norm does, but the stream may be of this rank's share of the rows."""
        return self._read(x, residual_TD, weight_D, eps, tap_TD, is_whole=False)

    def add(self, x: Sums, residual_TD: Tensor, out_TD: Tensor) -> None:
        """Finish a product of all ranks and do what norms.add does. residual: as above."""
        T = x.parts_STN.shape[1]
        if self._are_few(T):
            add(self._gathered(x), residual_TD, out_TD)
            return
        rows = self.share(T)
        share_RD = out_TD.new_empty(len(rows), out_TD.shape[1])
        add(self._dealt(x, rows), _rows_of(residual_TD, rows, T), share_RD)
        out_TD.copy_(self._all_rows(share_RD, T))

    def embed(self, ids_T: Tensor, table_VD: Tensor, first: int) -> Tensor:
        """Look up rows [T, D] of a table whose rows are cut. first: id of this rank's first row."""
        own_TD = own_rows(ids_T, table_VD, first)
        T = len(own_TD)
        if self._are_few(T):
            return rows_of_all(self.gather(own_TD))
        share_RD = rows_of_all(self._deal(own_TD[None], self.share(T))[0])
        return self._all_rows(share_RD, T)

    def gather(self, own: Tensor) -> Tensor:
        """Return `own` of every rank, [n, ...], by rank; all have one shape and dtype."""
        out = own.new_empty(self.shard.size, *own.shape)
        self._gather(own.contiguous(), out)
        return out

    def share(self, num_rows: int, rank: int | None = None) -> range:
        """Find a rank's rows, by default this one's: the last one may have fewer."""
        each = -(-num_rows // self.shard.size)
        first = (self.shard.rank if rank is None else rank) * each
        return range(first, min(first + each, num_rows))

    def is_same(self, tensor: Tensor) -> Tensor:
        """Whether every rank has the same bits in `tensor`: a bool on the device, for debugging."""
        sums_N = self.gather(checksum(tensor))
        return (sums_N == sums_N[0]).all()

    def _read(
        self,
        x: Sums,
        residual_TD: Tensor,
        weight_D: Tensor,
        eps: float,
        tap_TD: Tensor | None,
        *,
        is_whole: bool,
    ) -> tuple[Tensor, Tensor]:
        T = x.parts_STN.shape[1]
        if self._are_few(T):
            assert len(residual_TD) == T, f"a share of {len(residual_TD)} of {T} rows"
            return add_rms_norm(self._gathered(x), residual_TD, weight_D, eps, tap_TD)
        rows = self.share(T)
        residual_RD = _rows_of(residual_TD, rows, T)
        normed_RD, stream_RD = add_rms_norm(self._dealt(x, rows), residual_RD, weight_D, eps)
        normed_TD = self._all_rows(normed_RD, T)
        if tap_TD is None and not is_whole:
            return normed_TD, stream_RD
        stream_TD = self._all_rows(stream_RD, T)
        if tap_TD is not None:
            tap_TD.copy_(stream_TD)
        return normed_TD, stream_TD

    def _are_few(self, num_rows: int) -> bool:
        return num_rows <= self.border

    def _gathered(self, x: Sums) -> Sums:
        """Collect the parts of all ranks; those of experts rank by rank, as places_TS has them."""
        _check(x)
        return x._replace(parts_STN=self.gather(x.parts_STN).flatten(0, 1))

    def _dealt(self, x: Sums, rows: range) -> Sums:
        """Collect the parts of this rank's rows; those of experts slot by slot."""
        _check(x)
        parts_STN = self._deal(x.parts_STN, rows).flatten(0, 1)
        if x.weights_TS is None or x.places_TS is None:
            return x._replace(parts_STN=parts_STN)
        k, n = len(x.parts_STN), self.shard.size
        places_TS = _rows_of(x.places_TS, rows)
        places_TS = places_TS % k * n + places_TS // k
        # memory of its own, since kernels are compiled for aligned tensors
        weights_TS = _rows_of(x.weights_TS, rows).clone()
        return x._replace(parts_STN=parts_STN, weights_TS=weights_TS, places_TS=places_TS)

    def _deal(self, own_STD: Tensor, rows: range) -> Tensor:
        """Collect this rank's rows of every rank's tensors: [S, n, R, D]."""
        S, T, D = own_STD.shape
        out = own_STD.new_empty(S, self.shard.size, len(rows), D)
        lengths = [len(self.share(T, rank)) for rank in range(self.shard.size)]
        self._poison(out)
        if not only_compiles():
            for own_TD, out_NRD in zip(own_STD, out, strict=True):
                deal(own_TD, out_NRD, lengths, self.group)
        return out

    def _all_rows(self, share_RD: Tensor, num_rows: int) -> Tensor:
        """Gather the shares of all ranks: [T, D], in memory for products to read."""
        R, D = share_RD.shape
        each = len(self.share(num_rows, 0))
        if each > R:
            share_RD = torch.cat([share_RD, share_RD.new_zeros(each - R, D)])
        out_TD = empty_rows(share_RD, each * self.shard.size, D)
        self._gather(share_RD, out_TD)
        return out_TD[:num_rows]

    def _gather(self, own: Tensor, out: Tensor) -> None:
        self._poison(out)
        if not only_compiles():  # then other ranks may be doing something else
            gather(own, out, self.group)

    def _poison(self, out: Tensor) -> None:
        if self.poisons:
            out.view(-1).view(torch.uint8).fill_(0xFF)


def checksum(tensor: Tensor) -> Tensor:
    """Hash a tensor's bits to int64 [1] on its device: a sum over hashes of value and place."""
    bits = tensor.contiguous().view(BITS[tensor.element_size()]).flatten().long()
    place = torch.arange(len(bits), device=bits.device)
    mixed = (bits ^ (place * MIXING[0])) * MIXING[1]
    return ((mixed ^ (mixed >> 29)) * MIXING[0]).sum()[None]


def _rows_of(tensor_TX: Tensor, rows: range, num_rows: int | None = None) -> Tensor:
    """Take some rows; a tensor that has not num_rows has these already."""
    if num_rows is not None and len(tensor_TX) != num_rows:
        assert len(tensor_TX) == len(rows), (len(tensor_TX), len(rows), num_rows)
        return tensor_TX
    return tensor_TX[rows.start : rows.stop]


def _check(x: Sums) -> None:
    """A rank leaves one float32 part of a product, or results of experts that have places."""
    is_part = len(x.parts_STN) == 1 and x.parts_STN.dtype == torch.float32
    assert is_part if x.weights_TS is None else x.places_TS is not None, x.parts_STN.shape
