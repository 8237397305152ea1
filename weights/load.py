"""From a directory to tensors under one set of names, with a report: load_target and load_eagle.

Three stages: resolve (headers and config.json only), check (every name, shape and dtype at once,
and d2t), read. Nothing is returned unless all of it holds. A rank of several reads its parts alone,
but resolves and checks everything, as if it were the only one.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weights.config import TargetConfig
from weights.cuts import cut
from weights.draft.borrowed import drop_copies, read_borrowed
from weights.draft.config import DraftConfig
from weights.draft.resolve import Resolution, resolve_draft
from weights.draft.vocab import absolute_ids, check_mask, is_identity
from weights.files.header import INTEGER_DTYPES, TensorEntry
from weights.files.part import Part
from weights.files.reader import Reader
from weights.files.transfer import read_tensors
from weights.fp8 import is_scale, weight_of
from weights.mxfp4 import check_scales
from weights.ranks import check_draft_ranks, check_target_ranks
from weights.rename import rename
from weights.report import BindingReport, Log
from weights.shapes import Shapes, check_binding, check_dtypes, draft_shapes, target_shapes
from weights.shard import WHOLE, Shard
from weights.target import resolve_target, target_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A target's tensors under the names of this package: a rank's or whole.

    All have one dtype, but for weights of other forms, their scales, and sinks.
    config: of the whole model; `local` has the sizes of these tensors
    """

    config: TargetConfig
    tensors: dict[str, Tensor]
    report: BindingReport
    shard: Shard = WHOLE

    @property
    def local(self) -> TargetConfig:
        return self.config.local(self.shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEagle:
    """A draft's own tensors, without what it borrows (see `has_own_*` in its config).

    config: of the whole draft; `local` has the sizes of these tensors, but for d2t [W]
    A draft that is whole on each rank of a target has copies of what it borrows.
    """

    config: DraftConfig
    tensors: dict[str, Tensor]
    report: BindingReport
    shard: Shard = WHOLE

    @property
    def local(self) -> DraftConfig:
        return self.config.local(self.shard)


def load_target(
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
    shard: Shard = WHOLE,
) -> LoadedTarget:
    """Load a target of a known family; a CheckpointError lists all that is wrong.

    dtype: None keeps the dtype in which the embedding is stored, for all tensors
    shard: what to read of it; ValueError if it cannot be cut for as many ranks
    """
    reader = Reader(directory)
    log = Log()
    config, wanted, held = bind_target(reader, log)
    reader.problems.raise_if_any()
    check_target_ranks(config, shard.size)
    local = target_shapes(config.local(shard))
    parts = cut(wanted, local, shard)
    dtype = dtype or getattr(torch, config.dtype)
    tensors = read_tensors(
        reader, local, held, log, dtype=dtype, device=device, progress=progress, parts=parts
    )
    check_scales(tensors, held, reader.problems)
    reader.problems.raise_if_any()
    if _tied_copy(config, held):
        part = parts.get("embed_tokens.weight")
        _check_tied(reader, tensors["embed_tokens.weight"], held["lm_head.weight"], part)
    report = make_report(directory, "target", config.model_type, log)
    return LoadedTarget(config=config, tensors=tensors, report=report, shard=shard)


def bind_target(reader: Reader, log: Log) -> tuple[TargetConfig, Shapes, dict[str, TensorEntry]]:
    """Check a target by its headers; returns its config, what it demands and what files hold."""
    held = rename(reader, target_rows(reader), log)
    config = resolve_target(reader, log)
    wanted = target_shapes(config)
    wanted |= {name: held[name].shape for name in wanted if _is_flat(name, wanted, held)}
    check_dtypes(held, reader.problems, wanted)
    check_binding(wanted | _tied_copy(config, held), held, reader.problems)
    return config, wanted, held


def _is_flat(name: str, wanted: Shapes, held: dict[str, TensorEntry]) -> bool:
    """Say whether files have scales [N] where [N, 1] is wanted, one for each row."""
    if not is_scale(name) or name not in held:
        return False
    is_of_rows = wanted[name] == (wanted[weight_of(name)][0], 1)
    return is_of_rows and (*held[name].shape, 1) == wanted[name]


def load_eagle(
    directory: Path,
    target: LoadedTarget,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    aux_layers: tuple[int, ...] | None = None,
    progress: bool = True,
    shard: Shard | None = None,
    agree: Callable[[bool], bool] | None = None,
) -> LoadedEagle:
    """Load any draft for `target`; a CheckpointError lists all that is wrong.

    dtype:      None takes the target's
    aux_layers: boundaries to read instead of those that the checkpoint names
    shard:      what to read of it: the target's (None), or WHOLE, with whole copies of what it
                borrows; ValueError if it cannot be cut for as many ranks
    agree:      tells of what holds for this rank's rows whether it does for those of all; each rank
                calls it as often as the others. Only one rank needs none
    """
    shard = target.shard if shard is None else shard
    assert shard in (target.shard, WHOLE), f"{shard} of a draft, {target.shard} of its target"
    assert agree is not None or target.shard == WHOLE, f"{target.shard} asks no other"
    reader = Reader(directory)
    log = Log()
    resolution, d2t = bind_eagle(reader, target.config, aux_layers, log)
    config = resolution.config
    wanted = draft_shapes(config)
    if d2t is not None and is_identity(d2t, config.vocab_size):
        log.add("d2t", None, "d2t is the identity over the full vocabulary, dropped")
        config = dataclasses.replace(config, has_d2t=False)
    check_draft_ranks(config, shard.size)
    local = draft_shapes(config.local(shard))
    local.pop("d2t", None)
    held = resolution.held
    dtype = dtype or target.tensors["embed_tokens.weight"].dtype
    parts = cut(wanted, local, shard)
    tensors = read_tensors(
        reader, local, held, log, dtype=dtype, device=device, progress=progress, parts=parts
    )
    if d2t is not None and config.has_d2t:
        tensors["d2t"] = d2t.to(device)
    ids = None if shard == target.shard else target.shard.ids_of(config.vocab_size)
    config = drop_copies(config, tensors, target.tensors, log, ids=ids, agree=agree or bool)
    if shard != target.shard:
        dtype = target.tensors["embed_tokens.weight"].dtype
        files = Reader(target.report.directory)
        is_tied = target.config.has_tied_head
        tensors |= read_borrowed(config, files, is_tied, dtype=dtype, device=device)
    report = make_report(directory, "draft", config.format, log)
    return LoadedEagle(config=config, tensors=tensors, report=report, shard=shard)


def bind_eagle(
    reader: Reader, target: TargetConfig, aux_layers: tuple[int, ...] | None, log: Log
) -> tuple[Resolution, Tensor | None]:
    """Check a draft by its headers and d2t; returns its config with what files hold, and d2t."""
    resolution = resolve_draft(reader, target, aux_layers, log)
    check_binding(draft_shapes(resolution.config), resolution.bound, reader.problems)
    d2t = target_ids(reader, resolution)
    reader.problems.raise_if_any()
    return resolution, d2t


def target_ids(reader: Reader, resolution: Resolution) -> Tensor | None:
    """The draft's vocabulary as absolute ids, checked; None if there is no usable d2t."""
    V = resolution.config.vocab_size
    d2t = resolution.held.get("d2t")
    t2d = resolution.held.get("t2d")
    if d2t is None or d2t.dtype not in INTEGER_DTYPES or len(d2t.shape) != 1:
        return None
    ids = absolute_ids(reader.read(d2t.name), V, d2t.where, reader.problems)
    if t2d is None or t2d.dtype != "BOOL":
        return ids
    if t2d.shape == (V,):
        check_mask(reader.read(t2d.name), ids, t2d.where, reader.problems)
    else:
        reader.problems.add(f"{t2d.where} is {list(t2d.shape)}, [{V}] is needed")
    return ids


def make_report(directory: Path, role: str, format: str, log: Log) -> BindingReport:
    return BindingReport(
        directory=directory,
        role=role,
        format=format,
        fields=tuple(log.rows.values()),
        notes=tuple(log.notes),
        ignored=(*log.ignored.items(), *_trainer_files(directory)),
    )


def _tied_copy(config: TargetConfig, held: dict[str, TensorEntry]) -> Shapes:
    """A tied target may still carry its head; it must then equal the embedding."""
    if config.has_tied_head and "lm_head.weight" in held:
        return {"lm_head.weight": (config.vocab_size, config.hidden_size)}
    return {}


def _check_tied(reader: Reader, embedding: Tensor, head: TensorEntry, part: Part | None) -> None:
    copy = reader.read(head.name, embedding.device, part).to(embedding.dtype)
    if not torch.equal(copy, embedding):
        line = "differs from the embedding, but tie_word_embeddings is true"
        reader.problems.add(f"{head.where} {line}")
    reader.problems.raise_if_any()


def _trainer_files(directory: Path) -> Iterator[tuple[str, str]]:
    for file in sorted((*directory.glob("training_state*"), *directory.glob("optimizer*.pt"))):
        yield file.name, "a trainer's state beside the weights"
