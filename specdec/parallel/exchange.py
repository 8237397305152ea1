"""What the ranks of a model exchange: parts of sums, experts' results and rows of embeddings.

A product whose columns are cut leaves float32 parts on each rank, which go to the others as one.
The reader that adds a product's splits (kernels/norms.py) adds these too, in the order of ranks, so
a rank has the sum of a whole weight.

Few rows: every rank gathers all parts and reads all rows. Many: each rank is dealt its share of the
rows, a block of neighbours, and reads these; then the normed rows are gathered, rounded as they
are. The residual stream stays a share until somebody else reads it. Both ways give the same bits.

GPUs write into each other's memory (kernels/push.py) what has room there. For a few rows NCCL takes
4 us more, and a graph with its kernels takes the host ten times as long to launch; so it moves only
the rest. On a CPU gloo moves all.

Letters: T rows, D hidden, n ranks, R rows of this rank's share, k experts a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import only_compiles
from specdec.kernels.cut_table import own_rows, rows_of_all
from specdec.kernels.linear import Sums
from specdec.kernels.norms import add, add_rms_norm
from specdec.kernels.push import Boxes, can_push, push_all, push_in_all_forms, push_rows
from specdec.kernels.tiles import empty_rows
from specdec.parallel.transfers import deal, gather
from weights.shard import Shard


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's end. Results are new tensors, so graphs that capture them keep their places.

    group:  the name of the ranks' process group, as torch.distributed knows it
    border: how many numbers of float32 a rank sends in the time that one more transfer takes
    boxes:  where ranks write; None: on a CPU
    poisons: fills what is received with NaN before, for debugging
    """

    shard: Shard
    group: str
    border: int
    boxes: Boxes | None = None
    poisons: bool = False

    def __post_init__(self) -> None:
        assert self.shard.size > 1, "one rank has nobody to exchange with"

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
        _, T, D = x.parts_STN.shape
        if self.are_few(T, D):
            add(self._gathered(x), residual_TD, out_TD)
            return
        rows = self.share(T)
        share_RD = out_TD.new_empty(len(rows), out_TD.shape[1])
        add(self._dealt(x, rows), _rows_of(residual_TD, rows, T), share_RD)
        out_TD.copy_(self._all_rows(share_RD, T))

    def embed(self, ids_T: Tensor, table_VD: Tensor, first: int) -> Tensor:
        """Look up rows [T, D] of a table whose rows are cut. first: id of this rank's first row."""
        own_TD = own_rows(ids_T, table_VD, first)
        T, D = own_TD.shape
        if self.are_few(T, D):
            return rows_of_all(self.gather(own_TD))
        share_RD = rows_of_all(self._deal(own_TD[None], self.share(T))[0])
        return self._all_rows(share_RD, T)

    def gather(self, own: Tensor) -> Tensor:
        """Return `own` of every rank, [n, ...], by rank; all have one shape and dtype."""
        out = own.new_empty(self.shard.size, *own.shape)
        self._gather(own.contiguous()[None], out)
        return out

    def largest(self, own_T: Tensor) -> Tensor:
        """Find the largest of all ranks' numbers, for each row."""
        twice_T2 = torch.stack([own_T, own_T], 1)  # whole words, which GPUs write
        return self.gather(twice_T2)[..., 0].amax(0)

    def launch_all_forms(self) -> None:
        """Launch every kernel that moves something, to compile them."""
        if self.boxes is not None:
            push_in_all_forms(self.boxes, self.shard.size)

    def share(self, num_rows: int, rank: int | None = None) -> range:
        """Find a rank's rows, by default this one's: the last one may have fewer."""
        each = -(-num_rows // self.shard.size)
        first = (self.shard.rank if rank is None else rank) * each
        return range(first, min(first + each, num_rows))

    def are_few(self, num_rows: int, width: int) -> bool:
        """Whether rows are gathered whole: dealing saves less than its second transfer takes.

        A rank sends (n - 1) T D numbers, or (n - 1) / n of them and then of as many of 16 bits.
        """
        n = self.shard.size
        saved = num_rows * width * (n - 1) * (2 * n - 3) / (2 * n)
        return saved <= self.border or num_rows <= (n - 1) ** 2  # of more each rank has some

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
        _, T, D = x.parts_STN.shape
        if self.are_few(T, D):
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

    def _gathered(self, x: Sums) -> Sums:
        """Collect the parts of all ranks; those of experts rank by rank, as places_TS has them."""
        _check(x)
        if x.weights_TS is not None:
            return x._replace(parts_STN=self.gather(x.parts_STN).flatten(0, 1))
        out_nTD = x.parts_STN.new_empty(self.shard.size, *x.parts_STN.shape[1:])
        self._gather(x.parts_STN, out_nTD)
        return x._replace(parts_STN=out_nTD)

    def _dealt(self, x: Sums, rows: range) -> Sums:
        """Collect the parts of this rank's rows; those of experts slot by slot."""
        _check(x)
        assert len(x.parts_STN) == 1 or x.weights_TS is not None, "parts of many rows are added"
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
        for own_TD, out_NRD in zip(own_STD, out, strict=True):
            if self.boxes is not None and can_push(lengths[0] * own_TD[0].nbytes):
                push_rows(own_TD, out_NRD, self.boxes, lengths[0])
            elif not only_compiles():  # then other ranks may be doing something else
                deal(own_TD, out_NRD, lengths, self.group)
        return out

    def _all_rows(self, share_RD: Tensor, num_rows: int) -> Tensor:
        """Gather the shares of all ranks: [T, D], in memory for products to read."""
        R, D = share_RD.shape
        each = len(self.share(num_rows, 0))
        if each > R:
            share_RD = torch.cat([share_RD, share_RD.new_zeros(each - R, D)])
        out_TD = empty_rows(share_RD, each * self.shard.size, D)
        self._gather(share_RD[None], out_TD.view(self.shard.size, each, D))
        return out_TD[:num_rows]

    def _gather(self, own_PX: Tensor, out_nX: Tensor) -> None:
        """Collect the sum of each rank's parts, as push_all does."""
        self._poison(out_nX)
        if self.boxes is not None and can_push(out_nX[0].nbytes):
            push_all(own_PX, out_nX, self.boxes)
        elif not only_compiles():  # then other ranks may be doing something else
            assert len(own_PX) == 1, f"{len(own_PX)} parts, which only GPUs add"
            gather(own_PX[0], out_nX, self.group)

    def _poison(self, out: Tensor) -> None:
        if self.poisons:
            out.view(-1).view(torch.uint8).fill_(0xFF)


def _rows_of(tensor_TX: Tensor, rows: range, num_rows: int | None = None) -> Tensor:
    """Take some rows; a tensor that has not num_rows has these already."""
    if num_rows is not None and len(tensor_TX) != num_rows:
        assert len(tensor_TX) == len(rows), (len(tensor_TX), len(rows), num_rows)
        return tensor_TX
    return tensor_TX[rows.start : rows.stop]


def _check(x: Sums) -> None:
    """A rank leaves float32 parts of a product, or results of experts that have places."""
    are_parts = x.parts_STN.dtype == torch.float32
    assert are_parts if x.weights_TS is None else x.places_TS is not None, x.parts_STN.shape
