"""A draft's embedding or head that equals the target's IS the target's: compared by value, the copy is dropped."""

import dataclasses

import torch
from torch import Tensor

from weights.config import EagleConfig
from weights.report import Log


def drop_copies(
    config: EagleConfig, tensors: dict[str, Tensor], target_tensors: dict[str, Tensor], log: Log
) -> EagleConfig:
    """Remove what is borrowed from `tensors`; the config says who owns the rest."""
    embedding = target_tensors["embed_tokens.weight"]
    # a tied target's head is its embedding
    head = target_tensors.get("lm_head.weight", embedding)
    has_own_embedding = _keep(tensors, "embed_tokens.weight", embedding, "has_own_embedding", log)
    has_own_head = _keep(
        tensors, "lm_head.weight", None if config.has_d2t else head, "has_own_head", log
    )
    return dataclasses.replace(
        config, has_own_embedding=has_own_embedding, has_own_head=has_own_head
    )


def _keep(
    tensors: dict[str, Tensor], name: str, theirs: Tensor | None, field: str, log: Log
) -> bool:
    if name not in tensors:
        return False
    mine = tensors[name]
    if (
        theirs is None
        or mine.shape != theirs.shape
        or not torch.equal(mine.to(theirs.device, theirs.dtype), theirs)
    ):
        return True
    del tensors[name]
    log.add(field, False, f"{name} equals the target's, the copy is dropped")
    return False
