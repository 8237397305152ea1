"""The order of nodes by their scores, and the scores as the twins of the levels compute them.

The score of a node is the logarithm of its path's probability: the draft's log softmax, summed from
the root on. Scores only fall along a path, and the earlier of equal nodes is the better one, so the
ancestors of every kept node are kept too. Row 0 of a request is the root, the last sampled token;
rows 1, 2, ... are the kept nodes, the best first: a parent's row comes before its children.

The operations have fixed shapes and never read the device from the host, so that graphs can capture
them. Letters: X rows, W draft vocabulary, M nodes of all levels.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, tl
from specdec.kernels.gumbel import log_ref
from specdec.kernels.invariant import blocked_exp, tree_sum

ROOT = -1  # as a parent among the nodes of all levels
LOW_BITS = 32


@jit
def ranks(score, i, scores_ptr, count, end, STEP: tl.constexpr):
    """Count the better ones among scores [end], of which those from `count` on are -inf.

    score: of node i, both in blocks; of equal ones the earlier is the better
    """
    rank = tl.zeros(score.shape, tl.int32)
    for start in range(0, end, STEP):
        o = start + tl.arange(0, STEP)
        other = tl.load(scores_ptr + o, mask=o < count, other=float("-inf"))
        is_better = other[None, :] > score[:, None]
        is_equal = other[None, :] == score[:, None]
        is_before = is_better | (is_equal & (o[None, :] < i[:, None]))
        rank += tl.sum((is_before & (o < end)[None, :]).to(tl.int32), axis=1)
    return rank


def best(scores_XM: Tensor, count: int) -> Tensor:
    """Find the places [X, count] of the greatest float32 scores, the first of equal ones first.

    NaN is less than every number.
    """
    scores_XM = torch.where(scores_XM.isnan(), -torch.inf, scores_XM + 0.0)  # -0.0 equals 0.0
    bits_XM = scores_XM.contiguous().view(torch.int32).long()
    ordered_XM = torch.where(bits_XM < 0, bits_XM ^ 0x7FFFFFFF, bits_XM)
    place_M = torch.arange(scores_XM.shape[-1], device=scores_XM.device)
    # no two keys are equal
    key_XM = (ordered_XM << LOW_BITS) + ((1 << LOW_BITS) - 1 - place_M)
    return key_XM.topk(count, dim=-1).indices


def log_probs(scores_XW: Tensor) -> Tensor:
    """Log softmax in float32, at most 0; a row's result depends on nothing but the row."""
    top_X1 = scores_XW.amax(dim=-1, keepdim=True)
    behind_XW = scores_XW - top_X1
    powers_XW = behind_XW.exp() if behind_XW.is_cuda else blocked_exp(behind_XW)
    return behind_XW - log_ref(tree_sum(powers_XW))


def perturbed(
    logits_XW: Tensor, floor_X: Tensor, temperature_X: Tensor, noise_BW: Tensor
) -> Tensor:
    """logits + temperature * noise, -inf where logits / temperature are below the floor.

    The rows of a batch slot have the same noise; greedy ones have temperature 0, and no floor.
    """
    scale_X1 = temperature_X[:, None]
    is_greedy_X1 = scale_X1 == 0
    scaled_XW = logits_XW / torch.where(is_greedy_X1, 1, scale_X1)
    noise_XW = noise_BW.repeat_interleave(len(logits_XW) // len(noise_BW), dim=0)
    noisy_XW = torch.where(is_greedy_X1, logits_XW, logits_XW + scale_X1 * noise_XW)
    is_out_XW = (scaled_XW < floor_X[:, None]) & ~is_greedy_X1
    return torch.where(is_out_XW, -torch.inf, noisy_XW)


def kept_nodes(scores_BM: Tensor, parents_BM: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Keep the best nodes: their places and the rows of their parents [B, X], 0 for the root.

    parents_BM: places of the parents, or ROOT
    """
    place_BX = best(scores_BM, num_nodes)
    row_X = torch.arange(1, num_nodes + 1, device=place_BX.device).expand_as(place_BX)
    # the last column stands for the root
    row_BM = torch.zeros_like(parents_BM[:, :1]).repeat(1, parents_BM.shape[1] + 1)
    row_BM.scatter_(1, place_BX, row_X)
    parents_BX = parents_BM.gather(1, place_BX)
    parents_BX = torch.where(parents_BX == ROOT, parents_BM.shape[1], parents_BX)
    return place_BX, row_BM.gather(1, parents_BX)


def depths(place_X: Tensor, width: int) -> Tensor:
    """Return the depth of nodes: the first level has `width` of them, each further one its square.

    place_X: among the nodes of all levels
    """
    later_X = (place_X - width).div(width**2, rounding_mode="floor") + 2
    return torch.where(place_X < width, 1, later_X)
