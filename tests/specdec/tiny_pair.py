"""Tiny random pairs whose every weight shows in the logits, run by the engine and the naive draft.

A tensor depends on its name and shape only, so configs that differ in one flag share all weights
but those of the flag.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import torch
from torch import Tensor

from specdec.kernels.linear import linear
from specdec.rounds.upload import RowStart
from specdec.runner import Runner
from specdec.scheduling.work import PromptPart
from specdec.sizes import EngineSizes
from tests.naive_eagle import borrow, draft_logits, target_features
from tests.reference import Reference
from tests.weights.formats import unfuse
from tests.weights.pieces import arranged
from tests.weights.tiny import tiny_target, write_target
from weights import (
    BindingReport,
    EagleConfig,
    LayerKind,
    LoadedEagle,
    LoadedTarget,
    TargetConfig,
    load_target,
)
from weights.draft.config import DraftConfig
from weights.shapes import Shapes, draft_shapes, target_shapes

Config = TypeVar("Config", TargetConfig, EagleConfig)

NUM_DRAFTS = 3
PROMPT = [7, 61, 13, 88, 2, 40, 40, 5, 19, 73, 31]
ROW, BLOCK = 1, 2  # neither the first row nor the first block


def lively(shapes: Shapes, seed: int = 0, scale: float = 0.15) -> dict[str, Tensor]:
    """Fused random tensors, norms around 1."""
    pieces = {
        name: scale * torch.randn(shape, generator=_generator(name, seed))
        for name, shape in shapes.items()
    }
    pieces |= {name: tensor + 1 for name, tensor in pieces.items() if "norm" in name}
    return arranged(pieces)


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(crc32(name.encode()) + seed)


@dataclasses.dataclass(frozen=True)
class TargetPair:
    """One target as the engine and as the reference read it."""

    loaded: LoadedTarget
    reference: Reference


def on_disk(directory: Path, config: TargetConfig, seed: int = 0, **keys: object) -> TargetPair:
    """A random target, written with further keys of config.json and read back."""
    target = dataclasses.replace(
        tiny_target(config.model_type), config=config, tensors=lively(target_shapes(config), seed)
    )
    write_target(directory, target, **keys)
    return TargetPair(load_target(directory, progress=False), Reference(directory))


def changed(config: Config, **changes: object) -> Config:
    """A target's or a draft's config with other values; keys of LayerKind go to its layers."""
    of_layer = {field.name for field in dataclasses.fields(LayerKind)}
    in_layers = {key: value for key, value in changes.items() if key in of_layer}
    others = {key: value for key, value in changes.items() if key not in of_layer}
    if isinstance(config, TargetConfig):
        num_layers = others.pop("num_layers", config.num_layers)
        others["layers"] = (dataclasses.replace(config.layers[0], **in_layers),) * num_layers
    else:
        others["layer"] = dataclasses.replace(config.layer, **in_layers)
    return dataclasses.replace(config, **others)


def random_draft(config: DraftConfig) -> LoadedEagle:
    """A draft that was never in a file. What a block's heads say of the token before counts."""
    tensors = lively(
        {name: shape for name, shape in draft_shapes(config).items() if name != "d2t"}, seed=1
    )
    tensors |= {n: 3 * x for n, x in tensors.items() if "markov_w" in n or "codebook" in n}
    if config.has_d2t:
        order = torch.randperm(config.vocab_size, generator=_generator("d2t", 0))
        tensors["d2t"] = order[: config.draft_vocab_size].sort().values
    report = BindingReport(directory=Path(), role="draft", format="", fields=())
    return LoadedEagle(config=config, tensors=tensors, report=report)


@dataclasses.dataclass(frozen=True)
class Chain:
    """The logits of a chain of drafts and the tokens that it stands behind."""

    tokens: list[int]
    logits_KW: Tensor


def engine_chains(
    target: TargetPair, eagle: LoadedEagle, chunks: Sequence[int] = (len(PROMPT),)
) -> list[Chain]:
    """The chains behind PROMPT in these chunks, and behind an accepting round, on NaN caches."""
    sizes = EngineSizes(
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        num_kv_blocks=3,
        num_speculative_tokens=NUM_DRAFTS,
    )
    runner = Runner(target.loaded, eagle, sizes, torch.device("cpu"))
    runner.target_cache.fill_(torch.nan)
    runner.draft_cache.fill_(torch.nan)
    heard = record_logits(runner)
    runner.start_rows([(ROW, RowStart(blocks=[BLOCK], num_draft_tokens=NUM_DRAFTS))])
    start = 0
    for length in chunks:
        heard.clear()
        runner.run_step(
            parts=[
                PromptPart(state_row=ROW, prompt=PROMPT, start=start, length=length, blocks=[BLOCK])
            ]
        )
        start += length
    first = Chain([*PROMPT, runner.read(1).sampled_tokens[0][0]], torch.cat(heard))
    heard.clear()
    runner.state.draft_tokens[ROW, :2] = torch.tensor(
        target.reference.greedy(first.tokens, 2)
    )  # two drafts that hold
    runner.run_step([ROW], max_num_computed=len(PROMPT))
    result = runner.read(1)
    committed = result.sampled_tokens[0][: result.num_accepted[0] + 1]
    assert len(committed) > 2, result
    return [first, Chain(first.tokens + committed, torch.cat(heard))]


def record_logits(runner: Runner) -> list[Tensor]:
    """A list that receives the draft's logits, step by step."""
    heard: list[Tensor] = []
    model = runner.draft.model
    for name in ("head_input", "next_level"):
        setattr(model, name, _listening(getattr(model, name), model.lm_head.weight, heard))
    return heard


def _listening(head_of: Callable[..., tuple[Tensor, Tensor]], weight: Tensor, heard: list[Tensor]):
    def listen(*inputs: Tensor, **out: Tensor | None) -> tuple[Tensor, Tensor]:
        normed_XD, recycled_XD = head_of(*inputs, **out)
        heard.append(linear(normed_XD, weight, out_dtype=torch.float32))
        return normed_XD, recycled_XD

    return listen


def naive_chain(reference: Reference, eagle: LoadedEagle, tokens: list[int]) -> Tensor:
    """What tests/naive_eagle.py says that the logits behind these tokens are."""
    weights = borrow(eagle.config, unfuse(eagle.config.layer, eagle.tensors), reference.weights)
    outputs = reference.forward(tokens[:-1])
    features_TE = target_features(eagle.config, outputs.boundaries, outputs.hidden_TD)
    return draft_logits(eagle.config, weights, tokens, features_TE, NUM_DRAFTS)
