"""Levels over the buffers of tests, and their twin on any device."""

import torch

from specdec.kernels.linear import linear_ref
from specdec.rounds.level import DraftLevel
from specdec.rounds.propose import write_level_ref


def level_of(buffers, state, level, max_model_len, num_levels=None, **more):
    """A level of width 1, or of the width that the buffers are for."""
    shape = buffers.sizes.widest
    return DraftLevel(
        buffers=buffers,
        state=state,
        level=level,
        shape=shape._replace(levels=num_levels or shape.levels),
        max_model_len=max_model_len,
        **({"d2t_W": None} | more),
    )


def propose_by_twin(normed_XD, weight_WD, to, draw=None):
    """What `propose_level` does where there are no kernels."""
    logits_XW = linear_ref(normed_XD, weight_WD, None, torch.float32)
    write_level_ref(logits_XW, to, None if draw is None else draw(logits_XW))
