"""Modules around the tensors of a checkpoint, which are not copied, and their paged caches."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.models.block import BlockModel
from specdec.models.decoder import DecoderModel
from specdec.models.eagle import EagleModel
from specdec.models.rope import rope_tables
from specdec.parallel.exchange import Exchange
from specdec.sizes import BLOCK_SIZE
from weights.config import Heads
from weights.draft.config import BlockConfig, EagleConfig
from weights.load import LoadedEagle, LoadedTarget
from weights.shard import WHOLE


def build_target(
    target: LoadedTarget,
    taps: Sequence[int],
    max_model_len: int,
    device: torch.device,
    exchange: Exchange | None = None,
) -> DecoderModel:
    """Build the target's module around the loaded tensors, a rank's or whole.

    exchange: how a rank meets the others; None: the tensors are whole
    """
    shard = WHOLE if exchange is None else exchange.shard
    assert target.shard == shard, f"tensors of {target.shard}, an exchange of {shard}"
    # one for each rope: all layers have the same width of heads
    ropes = {kind.rope: kind for kind in target.config.kinds}
    tables = {rope: rope_tables(kind, max_model_len, device) for rope, kind in ropes.items()}
    with torch.device("meta"):
        model = DecoderModel(target.config, tables, taps, exchange)
    tensors = {"lm_head.weight": target.tensors["embed_tokens.weight"]} | target.tensors
    model.load_state_dict(tensors, strict=True, assign=True)
    return model


def build_draft(
    eagle: LoadedEagle,
    target: DecoderModel,
    max_model_len: int,
    device: torch.device,
    exchange: Exchange | None = None,
) -> EagleModel:
    """Build an EAGLE draft's module around the loaded tensors; the target lends what it lacks.

    exchange: the target's; a draft that is whole on each rank exchanges nothing
    """
    if eagle.shard == WHOLE:
        exchange = None
    assert exchange is None or eagle.shard == exchange.shard, f"tensors of {eagle.shard}"
    assert isinstance(eagle.config, EagleConfig), eagle.config
    rope = rope_tables(eagle.config.layer, max_model_len, device)
    with torch.device("meta"):
        model = EagleModel(eagle.config, rope, exchange)
    _fill(model, eagle, target)
    if (mask_hidden := eagle.tensors.get("mask_hidden")) is not None:
        model.set_mask(mask_hidden)
    return model


def build_block(
    draft: LoadedEagle, target: DecoderModel, max_model_len: int, device: torch.device
) -> BlockModel:
    """Build a block draft's module; the target lends what it lacks."""
    assert isinstance(draft.config, BlockConfig), draft.config
    rope = rope_tables(draft.config.layer, max_model_len, device)
    with torch.device("meta"):
        model = BlockModel(draft.config, rope)
    _fill(model, draft, target)
    model.join_context()
    return model


def _fill(model: EagleModel | BlockModel, draft: LoadedEagle, target: DecoderModel) -> None:
    """Give a draft its tensors, and the target's where it has none."""
    tensors: dict[str, Tensor] = {
        "embed_tokens.weight": target.embed_tokens.weight,
        "lm_head.weight": target.lm_head.weight,
    }
    tensors |= draft.tensors
    for name in ("d2t", "mask_hidden"):  # of no module
        tensors.pop(name, None)
    model.load_state_dict(tensors, strict=True, assign=True)
    if not draft.config.has_own_head:
        model.logits_factor = target.logits_factor


def allocate_kv_cache(
    heads: Heads, num_layers: int, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate [L, 2, N + 1, G, S, C]: each layer's keys and values; block N is for padding.

    num_blocks: N, including those after the pool for nodes that have siblings
    """
    shape = (num_layers, 2, num_blocks + 1, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # on a CPU most of it is never used: pages read as zeros, and take memory once they are written
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def bytes_per_block(heads: Heads, num_layers: int, dtype: torch.dtype) -> int:
    """Count the bytes of one block over all layers of one model, keys and values."""
    return num_layers * 2 * heads.num_kv_heads * BLOCK_SIZE * heads.head_dim * dtype.itemsize
