"""The nodes of a round that were verified: the path to each, and the walk from the root.

The tensor operations have fixed shapes and never read the device from the host, so that graphs can
capture them. Letters: N verified rows, D nodes of the longest path among these. rank.py orders the
nodes: a parent's row comes before its children.
"""

import torch
from torch import Tensor


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
