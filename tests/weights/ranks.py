"""What a rank has of a whole load, computed another way than weights/cuts.py does."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tests.weights.pieces import Tensors
from weights import (
    EagleConfig,
    LayerKind,
    LoadedEagle,
    LoadedTarget,
    Shard,
    load_eagle,
    load_target,
)
from weights.shard import vocabulary_borders


def expected_part(loaded: LoadedTarget | LoadedEagle, shard: Shard) -> Tensors:
    """Take a rank's part of the tensors of a whole load, head by head and column by column."""
    config = loaded.config
    kinds = (
        (config.layer,) * config.num_layers if isinstance(config, EagleConfig) else config.layers
    )
    found = {}
    for name, tensor in loaded.tensors.items():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            borders = vocabulary_borders(len(tensor), shard.size)
            found[name] = tensor[borders[shard.rank] : borders[shard.rank + 1]]
        elif name.startswith("layers."):
            found[name] = _of_layer(kinds[int(name.split(".")[1])], name, tensor, shard)
        else:
            found[name] = tensor
    return found


def _of_layer(kind: LayerKind, name: str, tensor: Tensor, shard: Shard) -> Tensor:
    C, H, G = kind.head_dim, kind.num_heads, kind.num_kv_heads
    my_heads = torch.arange(H).chunk(shard.size)[shard.rank].tolist()
    if ".qkv_proj." in name:
        heads = tensor.split(C)
        q, k, v = heads[:H], heads[H : H + G], heads[H + G :]
        # the kv heads that these query heads read
        theirs = sorted({head // (H // G) for head in my_heads})
        return torch.cat(
            [*(q[i] for i in my_heads), *(k[i] for i in theirs), *(v[i] for i in theirs)]
        )
    if name.endswith(".o_proj.weight"):
        return torch.cat([tensor.split(C, dim=1)[i] for i in my_heads], dim=1)
    if ".experts." in name or name.endswith(".sinks"):
        return tensor.chunk(shard.size)[shard.rank]
    if ".mlp.gate_up_proj." in name:
        gate, up = tensor.chunk(2)
        return torch.cat([each.chunk(shard.size)[shard.rank] for each in (gate, up)])
    if name.endswith(".mlp.down_proj.weight"):
        return tensor.chunk(shard.size, dim=1)[shard.rank]
    return tensor


def load_targets(directory: Path, size: int, **options: object) -> list[LoadedTarget]:
    """Load a target on each of `size` ranks."""
    shards = [Shard(rank, size) for rank in range(size)]
    return [load_target(directory, shard=each, progress=False, **options) for each in shards]


def load_drafts(
    directory: Path, targets: list[LoadedTarget], shard: Shard | None = None
) -> list[LoadedEagle]:
    """Load a draft on the ranks of its target, which agree as processes would."""
    facts = [_facts(directory, target, shard) for target in targets]
    agreed = [all(each) for each in zip(*facts, strict=True)]
    found = []
    for target in targets:
        answers = iter(agreed)
        agree = partial(_next_of, answers)
        found.append(load_eagle(directory, target, progress=False, shard=shard, agree=agree))
        assert next(answers, None) is None
    return found


def _next_of(answers: Iterator[bool], _: bool) -> bool:
    return next(answers)


def _facts(directory: Path, target: LoadedTarget, shard: Shard | None) -> list[bool]:
    """List what a rank would tell the others."""
    facts: list[bool] = []

    def agree(fact: bool) -> bool:
        facts.append(fact)
        return fact

    load_eagle(directory, target, progress=False, shard=shard, agree=agree)
    return facts
