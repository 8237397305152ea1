"""A draft's embedding or head that equals the target's IS the target's: its copy is dropped."""

import dataclasses

import torch
from torch import Tensor

from weights.config import EagleConfig
from weights.report import Log


def drop_copies(
    config: EagleConfig, tensors: dict[str, Tensor], target_tensors: dict[str, Tensor], log: Log
) -> EagleConfig:
    """Remove what is borrowed from `tensors`; the config says what the draft still owns."""
    embedding = target_tensors["embed_tokens.weight"]
    # a tied target's head is its embedding
    head = target_tensors.get("lm_head.weight", embedding)
    theirs = {"has_own_embedding": ("embed_tokens.weight", embedding)}
    if not config.has_d2t:
        theirs["has_own_head"] = ("lm_head.weight", head)
    for field, (name, tensor) in theirs.items():
        if name in tensors and _is_equal(tensors[name], tensor):
            del tensors[name]
            log.add(field, False, f"{name} equals the target's, the copy is dropped")
    return dataclasses.replace(
        config,
        has_own_embedding="embed_tokens.weight" in tensors,
        has_own_head="lm_head.weight" in tensors,
    )


def _is_equal(mine: Tensor, theirs: Tensor) -> bool:
    same_shape = mine.shape == theirs.shape
    return same_shape and torch.equal(mine.to(theirs.device, theirs.dtype), theirs)
