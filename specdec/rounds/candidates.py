"""The best tokens of the rows that propose, one of which becomes the draft, by a selector.

What a selector adds to their scores depends on the draft before; which tokens they are does not, so
those of all rows are found at once. Letters: X rows, k candidates of each, N of which they are the
best, W draft vocabulary.
"""

import torch
from torch import Tensor

from specdec.kernels import use_triton
from specdec.kernels.best_children import Perturbation, launch_best_children
from specdec.kernels.choose_token import noise_ref
from specdec.rounds.rank import best, perturbed


def best_candidates(
    logits_XW: Tensor, count: int, noise: Perturbation | None
) -> tuple[Tensor, Tensor]:
    """Find the greatest logits + temperature * noise: scores float32 and ids int32 [k, X].

    noise: of each row; None where all are greedy
    """
    if use_triton(logits_XW):
        found = launch_best_children(logits_XW, count, noise)
        score_XN, id_XN = found.scores.flatten(1), found.ids.flatten(1)
    else:
        score_XN = logits_XW
        if noise is not None:
            floor_X, keys = noise
            noise_XW = noise_ref(keys, logits_XW.shape[1])
            score_XN = perturbed(logits_XW, floor_X, keys.temperatures, noise_XW)
        ids_W = torch.arange(logits_XW.shape[1], dtype=torch.int32, device=logits_XW.device)
        id_XN = ids_W.expand_as(score_XN)
    place_Xk = best(score_XN, count)
    return score_XN.gather(1, place_Xk).t().contiguous(), id_XN.gather(1, place_Xk).t().contiguous()


def of_all_ids(scores_kX: Tensor, ids_kX: Tensor, W: int) -> Tensor:
    """Lay out scores by id [X, W]: -inf where there is no candidate.

    ids: those of scores -inf may be anything
    """
    logits_XW = scores_kX.new_full((scores_kX.shape[1], W), -torch.inf)
    ids_Xk = ids_kX.t().long().clamp(0, W - 1)
    return logits_XW.scatter_reduce_(1, ids_Xk, scores_kX.t(), "amax")
