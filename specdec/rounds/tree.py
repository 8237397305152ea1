"""A draft tree: the best children of a node, the nodes that are kept, their paths, the walk.

The score of a node is the logarithm of its path's probability: the draft's log softmax, summed from
the root on. Scores only fall along a path, and the earlier of equal nodes is the better one, so the
ancestors of every kept node are kept too. Row 0 of a request is the root, the last sampled token;
rows 1, 2, ... are the kept nodes, the best first: a parent's row comes before its children.

The tensor operations have fixed shapes and never read the device from the host, so that graphs can
capture them. Letters: X rows, W draft vocabulary, M candidates of all levels, N verified rows, D
nodes of the longest path among these.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.gumbel import log_ref
from specdec.kernels.invariant import blocked_exp, tree_sum
from specdec.sizes import TreeShape

ROOT = -1  # as a parent among candidates
LOW_BITS = 32


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


class Nodes(NamedTuple):
    """The kept nodes of B trees, in the order of their rows."""

    tokens_BX: Tensor
    parents_BX: Tensor  # row of the parent, 0 for the root
    depths_BX: Tensor  # 1 for a child of the root
    scores_BX: Tensor


def kept_nodes(tokens_BM: Tensor, scores_BM: Tensor, parents_BM: Tensor, shape: TreeShape) -> Nodes:
    """The best nodes of all levels. parents_BM: places of candidates, or ROOT."""
    place_BX = best(scores_BM, shape.num_nodes)
    row_X = torch.arange(1, shape.num_nodes + 1, device=place_BX.device).expand_as(place_BX)
    # the last column stands for the root
    row_BM = torch.zeros_like(parents_BM[:, :1]).repeat(1, parents_BM.shape[1] + 1)
    row_BM.scatter_(1, place_BX, row_X)
    parents_BX = parents_BM.gather(1, place_BX)
    parents_BX = torch.where(parents_BX == ROOT, parents_BM.shape[1], parents_BX)
    return Nodes(
        tokens_BX=tokens_BM.gather(1, place_BX),
        parents_BX=row_BM.gather(1, parents_BX),
        depths_BX=depths(place_BX, shape.top_k),
        scores_BX=scores_BM.gather(1, place_BX),
    )


def depths(place_X: Tensor, top_k: int) -> Tensor:
    """Return the depth of candidates: the first level has top_k, each further one top_k**2."""
    later_X = (place_X - top_k).div(top_k**2, rounding_mode="floor") + 2
    return torch.where(place_X < top_k, 1, later_X)


def paths(parents_BN: Tensor, depths_BN: Tensor, max_depth: int) -> Tensor:
    """Return each row's path [B, N, D + 1]: entry j is its ancestor at depth j, -1 after it.

    parents_BN: the root's is itself
    """
    B, N = parents_BN.shape
    row_BN = torch.arange(N, device=parents_BN.device).expand(B, N)
    path_BND = torch.full_like(parents_BN, -1)[..., None].repeat(1, 1, max_depth + 1)
    for _ in range(max_depth + 1):
        path_BND.scatter_(2, depths_BN.gather(1, row_BN)[..., None], row_BN[..., None])
        row_BN = parents_BN.gather(1, row_BN)
    return path_BND


def walk(
    target_BN: Tensor, tokens_BN: Tensor, parents_BN: Tensor, is_node_BN: Tensor, max_depth: int
) -> Tensor:
    """Walk rows [B, D + 1] from the root to where no child equals the target's choice, then -1.

    target_BN:  the target's choice after each row
    tokens_BN:  of the rows themselves; siblings have different ones
    is_node_BN: rows of nodes, neither roots nor padding
    """
    row_B = torch.zeros_like(target_BN[:, 0])
    path = [row_B]
    for _ in range(max_depth):
        choice_B1 = target_BN.gather(1, row_B.clamp(min=0)[:, None])
        follows_BN = is_node_BN & (parents_BN == row_B[:, None]) & (tokens_BN == choice_B1)
        child_B = follows_BN.long().argmax(dim=1)  # 0, the root, where there is none
        row_B = torch.where(child_B > 0, child_B, -1)
        path.append(row_B)
    return torch.stack(path, dim=1)
