"""From a directory to tensors under one set of names, with a report: `load_target`, `load_eagle`, `inspect_checkpoint`.

Three stages: resolve (headers and config.json only), check (every name, shape and dtype at once, then d2t), read. Nothing is
returned unless all of it holds.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from weights.bind import check_binding, check_dtypes
from weights.config import EagleConfig, TargetConfig
from weights.eagle import Resolution, resolve_eagle
from weights.errors import Problems
from weights.fuse import fuse_plan
from weights.header import TensorEntry
from weights.reader import Reader
from weights.rename import TARGET_ROWS, rename
from weights.report import BindingReport, Log
from weights.shapes import Shapes, eagle_shapes, target_shapes
from weights.target import resolve_target
from weights.vocab import absolute_ids, check_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A target's tensors under the names of this package, all of one dtype."""

    config: TargetConfig
    tensors: dict[str, Tensor]
    report: BindingReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEagle:
    """A draft's own tensors; what it borrows is absent (`config.has_own_embedding`, `config.has_own_head`)."""

    config: EagleConfig
    tensors: dict[str, Tensor]
    report: BindingReport


def load_target(
    directory: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", progress: bool = True
) -> LoadedTarget:
    """Load a Llama, Mistral, Qwen2 or Qwen3 target; raises CheckpointError with everything that is wrong.

    dtype: None keeps the embedding's dtype as stored
    """
    reader, log, problems = Reader(directory), Log(), Problems(directory)
    config = resolve_target(reader, log, problems)
    renamed = rename(reader.entries, TARGET_ROWS, problems)
    held = {name: reader.entries[old] for name, old in renamed.names.items()}
    wanted = target_shapes(config)
    _check(wanted | _tied_copy(config, held), held, directory, problems)
    dtype = dtype or getattr(torch, config.dtype)
    tensors = read_tensors(reader, wanted, held, dtype, device, progress, log)
    _check_tied(reader, tensors, held, config, device, problems)
    return LoadedTarget(
        config=config, tensors=tensors, report=_report(directory, "target", config.model_type, log, renamed.ignored)
    )


def load_eagle(
    directory: Path,
    target: LoadedTarget,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    aux_layers: tuple[int, ...] | None = None,
    progress: bool = True,
) -> LoadedEagle:
    """Load any EAGLE draft for `target`; raises CheckpointError with everything that is wrong.

    dtype:      None takes the target's
    aux_layers: boundaries to read instead of those that the checkpoint names
    """
    reader, log, problems = Reader(directory), Log(), Problems(directory)
    resolution = resolve_eagle(reader, target.config, aux_layers, log, problems)
    d2t = _check_draft(reader, resolution, problems)
    wanted = {name: shape for name, shape in eagle_shapes(resolution.config).items() if name != "d2t"}
    dtype = dtype or target.tensors["embed_tokens.weight"].dtype
    tensors = read_tensors(reader, wanted, resolution.held, dtype, device, progress, log)
    if d2t is not None:
        tensors["d2t"] = d2t.to(device)
    config = _drop_copies(resolution.config, tensors, target, log)
    ignored = resolution.ignored | {
        name: "training only; checked against d2t" for name in resolution.held if name == "t2d"
    }
    return LoadedEagle(config=config, tensors=tensors, report=_report(directory, "draft", config.format, log, ignored))


def read_tensors(
    reader: Reader,
    wanted: Shapes,
    held: dict[str, TensorEntry],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: bool,
    log: Log,
) -> dict[str, Tensor]:
    """Read, cast and fuse everything in `wanted`, with a progress bar over bytes."""
    plan = fuse_plan(list(wanted))
    total = sum(held[name].num_bytes for name in wanted)
    tensors: dict[str, Tensor] = {}
    casts: dict[str, int] = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc=reader.directory.name, disable=not progress) as bar:
        for name, pieces in plan.items():
            parts = []
            for piece in pieces:
                part = reader.read(held[piece].name, device)
                if part.dtype != dtype:
                    casts[held[piece].dtype] = casts.get(held[piece].dtype, 0) + 1
                parts.append(part.to(dtype))
                bar.update(held[piece].num_bytes)
            tensors[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    for stored, count in casts.items():
        log.note(f"{count} tensors stored as {stored} are cast to {str(dtype).removeprefix('torch.')}")
    return tensors


def _check(wanted: Shapes, held: dict[str, TensorEntry], directory: Path, problems: Problems) -> None:
    check_dtypes(held, problems)
    check_binding(wanted, held, directory.name, problems)
    problems.raise_if_any()


def _tied_copy(config: TargetConfig, held: dict[str, TensorEntry]) -> Shapes:
    """A tied target may still carry its head; it must then equal the embedding."""
    if config.has_tied_head and "lm_head.weight" in held:
        return {"lm_head.weight": (config.vocab_size, config.layer.hidden_size)}
    return {}


def _check_tied(
    reader: Reader,
    tensors: dict[str, Tensor],
    held: dict[str, TensorEntry],
    config: TargetConfig,
    device: torch.device | str,
    problems: Problems,
) -> None:
    if not _tied_copy(config, held):
        return
    embedding = tensors["embed_tokens.weight"]
    if not torch.equal(reader.read(held["lm_head.weight"].name, device).to(embedding.dtype), embedding):
        problems.add(
            f"{held['lm_head.weight'].file.name}: tie_word_embeddings is true, but lm_head differs from embed_tokens"
        )
    problems.raise_if_any()


def _check_draft(reader: Reader, resolution: Resolution, problems: Problems) -> Tensor | None:
    """Everything that can be wrong with names, shapes, dtypes and the vocabulary, at once; the target ids of d2t."""
    held, config = resolution.held, resolution.config
    wanted = eagle_shapes(config)
    check_dtypes(held, problems)
    check_binding(
        wanted, {name: entry for name, entry in held.items() if name != "t2d"}, reader.directory.name, problems
    )
    ids = _target_ids(reader, resolution, problems)
    problems.raise_if_any()
    return ids


def _target_ids(reader: Reader, resolution: Resolution, problems: Problems) -> Tensor | None:
    held, V = resolution.held, resolution.config.vocab_size
    if "d2t" not in held or not held["d2t"].dtype.startswith("I"):
        return None
    ids = absolute_ids(reader.read(held["d2t"].name), V, held["d2t"].file.name, problems)
    if "t2d" in held and held["t2d"].dtype == "BOOL":
        check_mask(reader.read(held["t2d"].name), ids, V, held["t2d"].file.name, problems)
    return ids


def _drop_copies(config: EagleConfig, tensors: dict[str, Tensor], target: LoadedTarget, log: Log) -> EagleConfig:
    """A draft's embedding or head that equals the target's is the target's."""
    embedding = target.tensors["embed_tokens.weight"]
    head = target.tensors.get("lm_head.weight", embedding)
    for field, name, theirs in (
        ("has_own_embedding", "embed_tokens.weight", embedding),
        ("has_own_head", "lm_head.weight", head if not config.has_d2t else None),
    ):
        if name in tensors and theirs is not None and _same(tensors[name], theirs):
            del tensors[name]
            config = dataclasses.replace(config, **{field: False})
            log.add(field, False, f"{name} equals the target's, the copy is dropped")
    return config


def _same(mine: Tensor, theirs: Tensor) -> bool:
    return mine.shape == theirs.shape and torch.equal(mine.to(theirs.device, theirs.dtype), theirs)


def _report(directory: Path, role: str, format: str, log: Log, ignored: dict[str, str]) -> BindingReport:
    return BindingReport(
        directory=directory,
        role=role,
        format=format,
        fields=tuple(log.rows.values()),
        notes=tuple(log.notes),
        ignored=(*ignored.items(), *_beside(directory)),
    )


def _beside(directory: Path) -> Iterator[tuple[str, str]]:
    for file in sorted((*directory.glob("training_state*.pt"), *directory.glob("optimizer*.pt"))):
        yield file.name, "a trainer's state, beside the weights"
