"""The torch twin of the floor of whole rows, and what the twin of several ranks shares with it."""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.invariant import blocked_exp
from specdec.kernels.support_floor.units import MASS


class Limits(NamedTuple):
    """The limits of T rows."""

    temperatures: Tensor  # [T] float32; 0 = greedy: no limit
    log_min_p: Tensor  # [T] float32, -inf = off
    top_k: Tensor  # [T] int64, 0 = off
    top_p: Tensor  # [T] float32, 1 = off


def support_floor_ref(logits_TV: Tensor, limits: Limits) -> Tensor:
    V = logits_TV.shape[1]
    x_TV = scaled_ref(logits_TV, limits).sort(dim=-1, descending=True).values
    top_T1 = x_TV[:, :1]
    k_T1 = limits.top_k.clamp(max=V)[:, None]
    kth_T1 = torch.where(k_T1 > 0, x_TV.gather(1, (k_T1 - 1).clamp(min=0)), -torch.inf)
    floor_T1 = torch.maximum(kth_T1, top_T1 + limits.log_min_p[:, None])
    mass_TV = torch.where(x_TV >= floor_T1, masses_ref(x_TV, top_T1), 0)
    up_to_TV = mass_TV.cumsum(dim=-1)
    share_T1 = limits.top_p.double()[:, None]
    # of equals, the first decides for all: its share is the mass strictly above
    is_kept_TV = (up_to_TV - mass_TV).double() < share_T1 * up_to_TV[:, -1:].double()
    num_kept_T1 = is_kept_TV.sum(dim=-1, keepdim=True).clamp(min=1)
    last_T1 = torch.where(share_T1 < 1, x_TV.gather(1, num_kept_T1 - 1), -torch.inf)
    floor_T1 = torch.maximum(floor_T1, last_T1)
    return torch.where(has_limit_ref(limits), floor_T1[:, 0], -torch.inf)


def has_limit_ref(limits: Limits) -> Tensor:
    """Find the rows [T] that may keep less than everything."""
    has_limit_T = (limits.top_k > 0) | (limits.top_p < 1) | (limits.log_min_p > -torch.inf)
    return has_limit_T & (limits.temperatures != 0)


def scaled_ref(logits_TV: Tensor, limits: Limits) -> Tensor:
    """Compute the values [T, V]; what is not finite counts as masked."""
    is_greedy_T1 = (limits.temperatures == 0)[:, None]
    finite_TV = torch.where(logits_TV < torch.inf, logits_TV, -torch.inf)
    return finite_TV / torch.where(is_greedy_T1, 1, limits.temperatures[:, None])


def masses_ref(x_TV: Tensor, top_T1: Tensor) -> Tensor:
    """Compute the masses of values [T, V] int64, below a row's top."""
    # -inf less -inf is no number: a row without tokens has no mass
    shifted_TV = torch.where(x_TV == -torch.inf, -torch.inf, x_TV - top_T1)
    return (blocked_exp(shifted_TV.double()) * MASS).long()
