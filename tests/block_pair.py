"""Parallel drafts whose drafts hold, for the bundled target.

Weights of blocks are random, but what the markov head or the selector says outweighs the rest:
after each token it likes the one that followed it most often in the target's greedy texts. P-EAGLE
heads are the bundled EAGLE-3 head with a mask, and with more layers that change little.
"""

import dataclasses
import itertools
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch import Tensor

from tests.weights.blocks import DSPARK, FORMATS, block_config
from tests.weights.formats import PARALLEL
from tests.weights.pieces import Tensors
from tests.weights.tiny import random_tensors
from weights import BlockConfig, LoadedTarget, load_eagle, load_target
from weights.demo import demo_directory, demo_prompts
from weights.shapes import draft_shapes, layer_shapes

RANK = 64
SELECTOR = {
    **{"conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 48},
    **{"anchor_proposes": False, "markov": None, "confidence": None, "has_own_head": True},
}
SHAPES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "intermediate_size": 96}


def demo_target(dtype: torch.dtype = torch.float32, device: str = "cpu") -> LoadedTarget:
    directory = demo_directory("target")
    return load_target(directory, dtype=dtype, device=device, progress=False)


def bigram_config(target: LoadedTarget, **changes: object) -> BlockConfig:
    config = block_config(target, **SHAPES | DSPARK | {"markov_rank": RANK} | changes)
    return config if config.markov else dataclasses.replace(config, markov_rank=0)


def bigram_tensors(config: BlockConfig, target: LoadedTarget) -> Tensors:
    """Random weights with an eye for pairs of tokens; of a gated head the gate is half open."""
    shapes = {name: s for name, s in draft_shapes(config).items() if name != "d2t"}
    tensors = random_tensors(shapes, seed=3, dtype=torch.float32)
    tensors |= {name: x * 0 + 1 for name, x in tensors.items() if "norm" in name}
    tensors["norm.weight"] *= 0.02
    codes = torch.randn(config.vocab_size, RANK, generator=torch.Generator().manual_seed(4))
    codes /= codes.norm(dim=1, keepdim=True)
    following = _most_frequent()
    of_following = 4 * codes[[following.get(t, t) for t in range(len(codes))]]
    if config.selector_rank:
        name = "candidate_selector."
        tensors |= {f"{name}predecessor_codebook": of_following}
        tensors |= {f"{name}successor_codebook": 4 * codes} | _frequent_first(
            config, tensors, target
        )
    if config.markov is None:
        return tensors
    tensors["markov_head.markov_w1.weight"] = of_following
    tensors["markov_head.markov_w2.weight"] = 4 * codes
    if config.has_d2t:
        ids = _frequent_ids(config.draft_vocab_size)
        tensors["d2t"] = ids
        tensors["markov_head.markov_w2.weight"] = 4 * codes[ids]
    if config.markov == "gated":
        tensors["markov_head.gate.weight"] *= 0
    return tensors


def _frequent_first(config: BlockConfig, tensors: Tensors, target: LoadedTarget) -> Tensors:
    """Rows of masks stay near their embedding, after which frequent ids are the best ones."""
    names = [name for name in tensors if "o_proj" in name or "down_proj" in name]
    changed = {name: 0.004 * tensors[name] for name in names}
    hidden = target.tensors["embed_tokens.weight"][config.mask_token_id]
    hidden = hidden / hidden.square().mean().sqrt()
    changed["norm.weight"] = torch.ones_like(hidden)
    head = 0.1 * tensors["lm_head.weight"]
    head[_frequent_ids(config.selector_top_k)] += 5 * hidden / len(hidden)
    direction = (hidden / len(hidden)).expand(config.selector_rank, -1)
    return changed | {
        "lm_head.weight": head,
        "candidate_selector.hidden_projection.weight": direction.contiguous(),
    }


def _texts() -> list[list[int]]:
    found = demo_prompts()
    pairs = zip(found["prompts"], found["greedy_float32"], strict=False)
    return [prompt + text for prompt, text in pairs]


def _most_frequent() -> dict[int, int]:
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for text in _texts():
        for token, after in itertools.pairwise(text):
            counts[token][after] += 1
    return {token: after.most_common(1)[0][0] for token, after in counts.items()}


def _frequent_ids(count: int) -> Tensor:
    """The most frequent ids, and others, ascending."""
    counts = Counter(token for text in _texts() for token in text)
    ids = [token for token, _ in counts.most_common()] + list(range(4096))
    return torch.tensor(sorted(list(dict.fromkeys(ids))[:count]))


def write_bigrams(directory: Path, format: str = "deepspec-dspark", **changes: object) -> Path:
    """A directory with such a draft of the bundled target."""
    target = demo_target()
    config = bigram_config(target, **changes)
    FORMATS[format].write(directory, config, bigram_tensors(config, target), target)
    return directory


def write_parallel(directory: Path, format: str) -> Path:
    """A directory with a P-EAGLE head of two layers of the bundled target."""
    target = demo_target()
    eagle = load_eagle(demo_directory("eagle3"), target, progress=False)
    config = dataclasses.replace(eagle.config, num_layers=2, mask_token_id=7)
    shapes = layer_shapes("layers.1.", config.layer, config.layer.hidden_size)
    further = random_tensors(shapes, seed=5, dtype=torch.float32)
    further |= {name: x * 0.1 + 1 for name, x in further.items() if "norm" in name}
    further |= {name: x * 0.1 for name, x in further.items() if ".o_proj" in name or "down" in name}
    shape = draft_shapes(config)["mask_hidden"]
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    tensors = eagle.tensors | further | {"mask_hidden": mask}
    PARALLEL[format].write(directory, config, tensors, target)
    return directory
