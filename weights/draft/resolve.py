"""EAGLE drafts: from config.json and tensor shapes to one EagleConfig, whatever the format.

Everything is decided here and in the tables of layouts.py, rename.py and taps.py; nothing behind this package knows
formats. The order: format, layer, vocabulary, features, norms, owners; each decision is logged with its source.
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

from weights.bind import check_dtypes
from weights.config import EagleConfig, TargetConfig
from weights.draft.layer import ATTENTION, resolve_layer
from weights.draft.layouts import Evidence, Layout, find_layout, refuse_values
from weights.draft.norms import resolve_norms
from weights.draft.taps import KEYS, resolve_taps
from weights.draft.sources import Sources
from weights.errors import Problems
from weights.fields import Fields, layer_types, read_json_object
from weights.files.header import TensorEntry
from weights.files.reader import Reader
from weights.rename import DRAFT_ROWS, rename
from weights.report import Log

LAYER = re.compile(r"layers\.([0-9]{1,9})\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """A draft worked out from headers and config alone; which copies equal the target's is seen when data is read."""

    config: EagleConfig
    held: dict[str, TensorEntry]  # by the names used here
    ignored: dict[str, str]


def resolve_eagle(
    reader: Reader,
    target: TargetConfig | None,
    aux_layers: tuple[int, ...] | None,
    log: Log,
    problems: Problems,
) -> Resolution:
    """Work out what the draft in `reader` is; raises only where nothing more could be told.

    target: None when a draft is inspected alone; what depends on the target is then left open
    """
    raw = read_json_object(reader.directory / "config.json", problems)
    problems.raise_if_fatal()
    fields = Fields(raw, "config.json", problems)
    layout = find_layout(
        Evidence(raw=raw, flat=fields.values, names=frozenset(reader.entries)), problems
    )
    fields.strings("architectures")
    refuse_values(fields, problems)
    renamed = rename(reader.entries, DRAFT_ROWS, problems)
    held = {name: reader.entries[old] for name, old in renamed.names.items()}
    check_dtypes(held, problems)
    problems.raise_if_fatal()
    assert layout is not None, "no layout without a fatal problem"
    log.add("format", layout.name, "config.json and tensor names")
    config = _config(
        Sources(held=held, fields=fields, log=log, problems=problems), layout, target, aux_layers
    )
    problems.raise_if_fatal()
    return Resolution(config=config, held=held, ignored=renamed.ignored)


def _config(
    sources: Sources,
    layout: Layout,
    target: TargetConfig | None,
    aux_layers: tuple[int, ...] | None,
) -> EagleConfig:
    fields, log = sources.fields, sources.log
    layer = resolve_layer(sources)
    entry = _entry(sources, layer.hidden_size)
    V, W = _vocabulary(sources, target)
    Dt = _target_hidden_size(sources, layer.hidden_size, target)
    has_fc, boundaries = _features(sources, layout, entry, Dt, target, aux_layers)
    config = EagleConfig(
        format=layout.name,
        layer=layer,
        num_layers=_num_layers(sources),
        vocab_size=V,
        draft_vocab_size=W,
        target_hidden_size=Dt,
        max_position_embeddings=fields.get(int, "max_position_embeddings", 2048),
        aux_boundaries=boundaries,
        entry=entry,
        has_fc=has_fc,
        fc_bias=_fc_bias(sources, entry),
        **dataclasses.asdict(resolve_norms(sources, layout, entry)),
        has_own_embedding=_owns(sources, "has_own_embedding", "embed_tokens.weight"),
        has_own_head=_owns(sources, "has_own_head", "lm_head.weight"),
        has_d2t=sources.has("d2t") or W != V,
        sliding_window=_sliding_window(fields),
    )
    log.add(
        "max_position_embeddings",
        config.max_position_embeddings,
        fields.source("max_position_embeddings"),
    )
    log.add(
        "d2t",
        "offsets" if sources.has("d2t") else None,
        f"d2t is {'there' if sources.has('d2t') else 'absent'}",
    )
    log.add(
        "sliding_window", config.sliding_window, fields.source("layer_types", "use_sliding_window")
    )
    _check_borrowing(sources, config)
    return config


def _entry(sources: Sources, hidden_size: int) -> Literal["fc", "qkv"]:
    is_wide = sources.dim(f"{ATTENTION}q_proj.weight", 1) == 2 * hidden_size
    if is_wide or sources.has("layers.0.hidden_norm.weight"):
        source = "q_proj is 2D wide" if is_wide else "layers.0.hidden_norm.weight is there"
        sources.log.add("entry", "qkv", f"{source} (EAGLE-3)")
        return "qkv"
    sources.log.add("entry", "fc", "no hidden_norm, q_proj is D wide (EAGLE-1)")
    return "fc"


def _num_layers(sources: Sources) -> int:
    seen = max((int(found[1]) for found in map(LAYER.match, sources.held) if found), default=0) + 1
    written = sources.fields.get(int, "num_hidden_layers", 1)
    source = "tensor names" if seen >= written else sources.fields.source("num_hidden_layers")
    sources.log.add("num_layers", max(written, seen), source)
    if max(written, seen) > len(sources.held):
        sources.problems.add(
            f"{source}: {max(written, seen)} layers, but only {len(sources.held)} tensors",
            fatal=True,
        )
    return max(written, seen)


def _target_hidden_size(sources: Sources, hidden_size: int, target: TargetConfig | None) -> int:
    written = sources.fields.find(int, "target_hidden_size")
    told = hidden_size if written is None else written
    source = (
        "the draft's hidden_size"
        if written is None
        else sources.fields.source("target_hidden_size")
    )
    actual = told if target is None else target.layer.hidden_size
    sources.log.add("target_hidden_size", actual, source if target is None else "the target")
    if told != actual:
        sources.problems.add(
            f"a draft for another hidden size: {source} says {told}, the target's is {actual}"
        )
    return actual


def _vocabulary(sources: Sources, target: TargetConfig | None) -> tuple[int, int]:
    """V, the target's, and W, the draft's."""
    fields = sources.fields
    told = sources.dims({"embed_tokens.weight": 0, "t2d": 0})
    V = target.vocab_size if target else sources.number("vocab_size", "vocab_size", told, default=0)
    if target:
        sources.log.add("vocab_size", V, "the target")
    for what, size in {fields.source("vocab_size"): fields.find(int, "vocab_size"), **told}.items():
        if size is not None and size != V:
            sources.problems.add(
                f"a draft for another vocabulary: {what} says {size}, the target has {V} tokens"
            )
    W = sources.number(
        "draft_vocab_size",
        "draft_vocab_size",
        sources.dims({"lm_head.weight": 0, "d2t": 0}),
        default=V,
    )
    if W > V > 0:
        sources.problems.add(
            f"the draft's vocabulary of {W} tokens is larger than the target's {V}"
        )
    return V, W


def _features(
    sources: Sources,
    layout: Layout,
    entry: str,
    Dt: int,
    target: TargetConfig | None,
    aux_layers: tuple[int, ...] | None,
) -> tuple[bool, tuple[int, ...]]:
    """Whether there is an fc, and which boundaries it reads."""
    fields, log = sources.fields, sources.log
    if entry == "fc" or not fields.get(bool, "use_aux_hidden_state", True):
        source = "EAGLE-1" if entry == "fc" else fields.source("use_aux_hidden_state")
        log.add("aux_boundaries", (), f"{source}: the target's hidden after its final norm")
        if aux_layers is not None:
            sources.problems.add(f"aux_layers {aux_layers}: this draft reads none ({source})")
        sources.ignore("this draft reads the target's hidden after its final norm", *KEYS)
        return entry == "fc" or sources.has("fc.weight"), ()
    num_taps = _num_taps(sources, Dt)
    return True, resolve_taps(
        fields, layout, num_taps, target.num_layers if target else None, aux_layers, log
    )


def _num_taps(sources: Sources, Dt: int) -> int | None:
    width = sources.dim("fc.weight", 1)
    if width is None or Dt <= 0:
        return None
    if width % Dt:
        entry = sources.held["fc.weight"]
        sources.problems.add(
            f"{entry.file.name}: {entry.name} takes {width} channels, no multiple of the target's hidden size {Dt}"
        )
        return None
    return width // Dt


def _fc_bias(sources: Sources, entry: str) -> bool:
    # `bias` of an EAGLE-3 config is read by some engines as the attention's
    keys = ("eagle_fc_bias", "fusion_bias", "bias") if entry == "fc" else ("fusion_bias",)
    return sources.flag(
        "fc_bias", next((key for key in keys if key in sources.fields), None), "fc.bias"
    )


def _owns(sources: Sources, field: str, name: str) -> bool:
    found = sources.has(name)
    sources.log.add(
        field, found, f"{name} is there" if found else f"{name} is absent: the target's"
    )
    return found


def _sliding_window(fields: Fields) -> int | None:
    is_on = "sliding_attention" in layer_types(fields) or fields.get(
        bool, "use_sliding_window", False
    )
    return fields.need(int, "sliding_window") if is_on else None


def _check_borrowing(sources: Sources, config: EagleConfig) -> None:
    """What is borrowed must fit."""
    D, Dt, V, W = (
        config.layer.hidden_size,
        config.target_hidden_size,
        config.vocab_size,
        config.draft_vocab_size,
    )
    if not config.has_own_embedding and Dt != D:
        sources.problems.add(
            f"missing embed_tokens.weight [{V}, {D}]: the target's, of width {Dt}, does not fit"
        )
    if not config.has_own_head and (Dt != D or W != V):
        sources.problems.add(
            f"missing lm_head.weight [{W}, {D}]: the target's, [{V}, {Dt}], does not fit"
        )
    if config.entry == "fc" and Dt != D:
        sources.problems.add(
            f"an EAGLE-1 draft of hidden size {D} for a target of {Dt}: fc reads the target's hidden behind its tokens "
            "and the draft's own behind drafted ones, so both must have one size"
        )
    if not config.has_fc and Dt != D:
        sources.problems.add(
            f"no fc: a draft of hidden size {D} cannot read the target's hidden of {Dt}"
        )
