"""Transfers between the ranks of a process group: they move rows and never add any.

Sums inside a collective are added in an order that its library chooses, so here there is no
all-reduce. On CUDA both run on the current stream and can be captured; the tape repeats them.
group: the name of a group that torch.distributed knows; all its ranks call these in one order
"""

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions
from torch.distributed import distributed_c10d

# graphs/tape/record.py repeats ops of this namespace; those of others are looked into


@torch.library.custom_op("transfers::gather", mutates_args=("out",))
def gather(own: Tensor, out: Tensor, group: str) -> None:
    """Copy `own` [...] of every rank to `out` [n, ...], by rank; both are contiguous."""
    options = AllgatherOptions()
    options.asyncOp = False
    _finish(_named(group)._allgather_base(_bytes(out), _bytes(own), options))


@torch.library.custom_op("transfers::deal", mutates_args=("out_NRD",))
def deal(own_TD: Tensor, out_NRD: Tensor, lengths: list[int], group: str) -> None:
    """Send each rank its rows of `own`, and receive this rank's R rows of every rank's.

    lengths: of the ranks' rows, which follow each other; out: by rank. Both are contiguous.
    """
    N, R, _ = out_NRD.shape
    options = AllToAllOptions()
    options.asyncOp = False
    to, of = _bytes(out_NRD).view(N * R, -1), _bytes(own_TD).view(len(own_TD), -1)
    _finish(_named(group).alltoall_base(to, of, [R] * N, lengths, options))


def _bytes(tensor: Tensor) -> Tensor:
    """View a tensor's bytes, since gloo knows some dtypes only."""
    return tensor.view(-1).view(torch.uint8)


def _named(group: str) -> distributed.ProcessGroup:
    """Find the group; no public function of torch does."""
    return distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]


def _finish(work: distributed.Work | None) -> None:
    """Wait on the host, where a backend has no stream to wait on."""
    if work is not None:
        work.wait()
