"""The draft's vocabulary: which target token each draft token is.

Every public format stores d2t as OFFSETS: target id = draft id + d2t[draft id] (SafeAILab EAGLE-3,
kept by all others). Here it becomes absolute ids, int64. t2d, a mask for training, is only checked.
"""

import torch
from torch import Tensor

from weights.errors import Problems


def absolute_ids(d2t: Tensor, vocab_size: int, where: str, problems: Problems) -> Tensor:
    """Target ids [W] of the draft's tokens; ids out of range, repeated or absolute are problems.

    d2t: [W] offsets as stored
    """
    offsets = d2t.flatten().to(torch.int64)
    ids = offsets + torch.arange(offsets.numel())
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    repeated = _repeated(ids)
    if (outside.numel() or repeated.numel()) and _looks_absolute(offsets, vocab_size):
        line = "offsets are needed: target id = draft id + d2t[draft id]"
        problems.add(f"{where} holds absolute target ids, {line}")
        return ids
    if outside.numel():
        line = f"outside 0..{vocab_size - 1}, the first to {int(outside[0])}"
        problems.add(f"{where} maps {outside.numel()} draft tokens {line}")
    if repeated.numel():
        line = f"to one target id, {repeated.numel()} times, {int(repeated[0])}"
        problems.add(f"{where} maps several draft tokens {line}")
    return ids


def check_mask(t2d: Tensor, ids: Tensor, where: str, problems: Problems) -> None:
    """t2d, [V] bool, must be set exactly at the `absolute_ids` [W] of the draft's tokens."""
    vocab_size = len(t2d)
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        return
    differing = int((_cover(ids, vocab_size) != t2d).sum())
    offsets = ids - torch.arange(ids.numel())
    if not differing:
        return
    if _looks_absolute(offsets, vocab_size) and torch.equal(_cover(offsets, vocab_size), t2d):
        line = "they are absolute target ids, offsets are needed"
        problems.add(f"{where} covers exactly the values of d2t: {line}")
    else:
        problems.add(f"{where} and d2t disagree about {differing} target tokens")


def is_identity(ids: Tensor, vocab_size: int) -> bool:
    """Full vocabulary in the target's order: some trainers save zero offsets, others nothing."""
    return ids.numel() == vocab_size and torch.equal(ids, torch.arange(vocab_size))


def _cover(ids: Tensor, vocab_size: int) -> Tensor:
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)


def _repeated(ids: Tensor) -> Tensor:
    ordered = ids.sort().values
    return ordered[1:][ordered[1:] == ordered[:-1]]


def _looks_absolute(offsets: Tensor, vocab_size: int) -> bool:
    """Distinct ids inside the vocabulary. Real offsets repeat: neighbouring tokens share theirs."""
    inside = bool(((offsets >= 0) & (offsets < vocab_size)).all())
    return inside and offsets.numel() > 1 and not _repeated(offsets).numel()
