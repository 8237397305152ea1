"""What a draft takes from its target: an embedding or head that it lacks, or has a copy of."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from weights.draft.config import DraftConfig
from weights.files.reader import Reader
from weights.files.transfer import read_tensors
from weights.rename import rename
from weights.report import Log
from weights.shapes import Shapes
from weights.target import target_rows

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


def drop_copies(
    config: DraftConfig,
    tensors: dict[str, Tensor],
    target_tensors: dict[str, Tensor],
    log: Log,
    *,
    ids: range | None,
    agree: Callable[[bool], bool],
) -> DraftConfig:
    """An embedding or head that equals the target's is borrowed: its copy leaves `tensors`.

    ids:   of the target's rows, where the draft has all; None: both have the same ones
    agree: tells what holds on this rank's rows holds on those of all
    """
    embedding = target_tensors[EMBEDDING]
    theirs = {"has_own_embedding": (EMBEDDING, embedding)}
    if not config.has_d2t:
        # a tied target's head is its embedding
        theirs["has_own_head"] = (HEAD, target_tensors.get(HEAD, embedding))
    for field, (name, tensor) in theirs.items():
        if name not in tensors:
            continue
        mine = tensors[name] if ids is None else tensors[name][ids.start : ids.stop]
        if agree(_is_equal(mine, tensor)):
            del tensors[name]
            log.add(field, False, f"{name} equals the target's, the copy is dropped")
    return dataclasses.replace(
        config, has_own_embedding=EMBEDDING in tensors, has_own_head=HEAD in tensors
    )


def _is_equal(mine: Tensor, theirs: Tensor) -> bool:
    return mine.shape == theirs.shape and torch.equal(mine.to(theirs.device, theirs.dtype), theirs)


def read_borrowed(
    config: DraftConfig,
    target: Reader,
    is_tied: bool,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Read from the target's files, whole, what a draft borrows: [V, Dt] under the draft's names.

    is_tied: the target's head is its embedding
    """
    held = rename(target, target_rows(target), Log())
    sources = {EMBEDDING: EMBEDDING, HEAD: EMBEDDING if is_tied else HEAD}
    owned = {EMBEDDING: config.has_own_embedding, HEAD: config.has_own_head}
    borrowed = [name for name, is_own in owned.items() if not is_own]
    shape = config.vocab_size, config.target_hidden_size
    wanted: Shapes = {sources[name]: shape for name in borrowed}
    tensors = read_tensors(
        target, wanted, held, Log(), dtype=dtype, device=device, progress=False, parts={}
    )
    return {name: tensors[sources[name]] for name in borrowed}
