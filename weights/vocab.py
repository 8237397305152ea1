"""The draft's vocabulary: which target token each draft token is.

Every public format stores d2t as OFFSETS: target id = draft id + d2t[draft id] (SafeAILab EAGLE-3, kept by all trainers).
Here it becomes absolute ids, int64. t2d, a mask over the target's vocabulary used in training, is only checked.
"""

import torch
from torch import Tensor

from weights.errors import Problems


def absolute_ids(d2t: Tensor, vocab_size: int, where: str, problems: Problems) -> Tensor:
    """Target ids [W] of the draft's tokens; out of range, repeated or already absolute ids are problems.

    d2t: [W] offsets as stored
    """
    offsets = d2t.to(torch.int64)
    ids = offsets + torch.arange(offsets.numel())
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.numel() and _looks_absolute(offsets, vocab_size):
        problems.add(
            f"{where}: d2t holds absolute target ids, offsets are needed (target id = draft id + d2t[draft id])"
        )
    elif outside.numel():
        problems.add(
            f"{where}: d2t maps {outside.numel()} draft tokens outside 0..{vocab_size - 1}, first to {int(outside[0])}"
        )
    elif ids.unique().numel() != ids.numel():
        values, counts = ids.unique(return_counts=True)
        repeated = values[counts > 1]
        problems.add(
            f"{where}: d2t maps several draft tokens to the same target id, {repeated.numel()} such, first {int(repeated[0])}"
        )
    return ids


def check_mask(t2d: Tensor, ids: Tensor, vocab_size: int, where: str, problems: Problems) -> None:
    """t2d: [V] bool must be set exactly where some draft token maps."""
    if t2d.shape != (vocab_size,):
        problems.add(f"{where}: t2d is {list(t2d.shape)}, [{vocab_size}] is needed")
        return
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        return
    expected = torch.zeros(vocab_size, dtype=torch.bool)
    expected[ids] = True
    differing = int((expected != t2d).sum())
    if differing:
        problems.add(f"{where}: t2d and d2t disagree about {differing} target tokens")


def _looks_absolute(offsets: Tensor, vocab_size: int) -> bool:
    inside = bool(((offsets >= 0) & (offsets < vocab_size)).all())
    return inside and offsets.unique().numel() == offsets.numel()
