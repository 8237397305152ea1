"""EAGLE drafts: from config.json and tensor shapes to one EagleConfig, whatever the format.

The order: format, layer, vocabulary, features, norms, owners; each is logged with its source.
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

from weights.config import EagleConfig, TargetConfig
from weights.draft.layer import ATTENTION, resolve_layer
from weights.draft.layouts import ONLY, Evidence, find_layout
from weights.draft.norms import resolve_norms
from weights.draft.sources import Sources
from weights.families.table import FAMILIES
from weights.fields import Fields, Range, layer_types, read_json_object, refuse_values
from weights.files.header import TensorEntry
from weights.files.reader import Reader
from weights.rename import DRAFT_ROWS, rename
from weights.report import OTHER_TAPS, Log
from weights.shapes import check_dtypes, file_names

LAYER = re.compile(r"layers\.([0-9]{1,9})\.")
TAP_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
TAPPED_LAYERS = Range(0, 2**31 - 1)  # -1, the output before the first layer, is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """A draft from headers and config alone; copies of the target's tensors are found later."""

    config: EagleConfig
    held: dict[str, TensorEntry]  # by the names of this package

    @property
    def bound(self) -> dict[str, TensorEntry]:
        return {name: entry for name, entry in self.held.items() if name != "t2d"}


def resolve_eagle(
    reader: Reader, target: TargetConfig | None, aux_layers: tuple[int, ...] | None, log: Log
) -> Resolution:
    """Resolve the draft in `reader`; raises only if nothing more can be known. See Sources."""
    problems = reader.problems
    raw = read_json_object(reader.directory / "config.json", problems)
    problems.raise_if_fatal()
    fields = Fields(raw, "config.json", problems)
    evidence = Evidence(raw=raw, flat=fields.values, names=frozenset(reader.entries))
    layout = find_layout(evidence, problems)
    fields.strings("architectures")
    refuse_values(fields, ONLY)
    held = rename(reader, DRAFT_ROWS, log)
    if "t2d" in held:
        log.ignored[held["t2d"].name] = "a mask used in training; checked against d2t"
    check_dtypes(held, problems)
    problems.raise_if_fatal()
    assert layout is not None, "no layout without a fatal problem"
    log.add("format", layout.name, "config.json and tensor names")
    sources = Sources(
        held=held, fields=fields, layout=layout, target=target, aux_layers=aux_layers, log=log
    )
    config = _config(sources)
    problems.raise_if_fatal()
    return Resolution(config=config, held=held)


def _config(sources: Sources) -> EagleConfig:
    fields = sources.fields
    log = sources.log
    layer = resolve_layer(sources)
    entry = _entry(sources, layer.hidden_size)
    V, W = _vocabulary(sources)
    Dt = _target_hidden_size(sources, layer.hidden_size)
    has_fc, boundaries = _features(sources, entry, Dt)
    num_layers = _num_layers(sources)
    layer = dataclasses.replace(layer, window=_window(sources, num_layers))
    config = EagleConfig(
        format=sources.layout.name,
        layer=layer,
        num_layers=num_layers,
        vocab_size=V,
        draft_vocab_size=W,
        target_hidden_size=Dt,
        max_position_embeddings=fields.get(int, "max_position_embeddings", 2048),
        aux_boundaries=boundaries,
        entry=entry,
        has_fc=has_fc,
        fc_bias=_fc_bias(sources, entry),
        has_d2t=sources.has("d2t") or W != V,
    )
    config = dataclasses.replace(
        resolve_norms(sources, config),
        has_own_embedding=_owns(sources, "has_own_embedding", "embed_tokens.weight"),
        has_own_head=_owns(sources, "has_own_head", "lm_head.weight"),
    )
    log.add_read(fields, config, max_position_embeddings="max_position_embeddings")
    log.add("d2t", "offsets" if sources.has("d2t") else None, sources.presence("d2t"))
    _check_borrowing(config, sources)
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
    num_layers = max(written, seen)
    sources.log.add("num_layers", num_layers, source)
    if num_layers > len(sources.held):
        where = f"{file_names(sources.held)}: {source}" if seen >= written else source
        line = f"{where}: {num_layers} layers, but only {len(sources.held)} tensors"
        sources.fields.problems.add(line, fatal=True)
    return num_layers


def _window(sources: Sources, num_layers: int) -> int | None:
    """Read the window of all layers; the first entries of layer_types are the draft's."""
    fields = sources.fields
    is_sliding = [kind == "sliding_attention" for kind in layer_types(fields)[:num_layers]]
    if any(is_sliding) and not all(is_sliding):
        what = "layers with and without a window are not supported in one draft"
        fields.problems.add(f"{fields.source('layer_types')}: {what}")
    has_window = any(is_sliding) or fields.get(bool, "use_sliding_window", False)
    window = fields.need(int, "sliding_window") if has_window else None
    sources.log.add("sliding_window", window, fields.source("layer_types", "use_sliding_window"))
    return window


def _target_hidden_size(sources: Sources, hidden_size: int) -> int:
    target = sources.target
    written = sources.fields.find(int, "target_hidden_size")
    source = sources.fields.source("target_hidden_size")
    if written is None:
        written = hidden_size
        source = f"the draft's hidden_size (config.json and {file_names(sources.held)})"
    actual = written if target is None else target.hidden_size
    sources.log.add("target_hidden_size", actual, source if target is None else "the target")
    if written != actual:
        line = f"a draft for another hidden size: {source} says {written}, the target's is {actual}"
        sources.fields.problems.add(line)
    return actual


def _vocabulary(sources: Sources) -> tuple[int, int]:
    """V, the target's, and W, the draft's."""
    fields = sources.fields
    sizes = sources.dims({"embed_tokens.weight": 0, "t2d": 0})
    if sources.target is None:
        V = sources.number("vocab_size", sizes, default=0)
    else:
        V = sources.target.vocab_size
        sources.log.add("vocab_size", V, "the target")
    written = {fields.source("vocab_size"): fields.find(int, "vocab_size")}
    stated = {sources.held[name].where: size for name, size in sizes.items()}
    for source, size in (written | stated).items():
        if size is not None and size != V:
            line = f"{source} says {size}, the target has {V} tokens"
            fields.problems.add(f"a draft for another vocabulary: {line}")
    heads = sources.dims({"lm_head.weight": 0, "d2t": 0})
    W = sources.number("draft_vocab_size", heads, default=V)
    if W > V > 0:
        where = sources.where("draft_vocab_size", *heads)
        line = f"the draft's vocabulary of {W} tokens is larger than the target's {V}"
        fields.problems.add(f"{where}: {line}")
    return V, W


def _features(sources: Sources, entry: str, Dt: int) -> tuple[bool, tuple[int, ...]]:
    """Whether there is an fc, and which boundaries it reads."""
    fields = sources.fields
    if entry == "fc" or not fields.get(bool, "use_aux_hidden_state", True):
        source = "EAGLE-1" if entry == "fc" else fields.source("use_aux_hidden_state")
        sources.log.add("aux_boundaries", (), f"{source}: the target's hidden after its final norm")
        if sources.aux_layers is not None:
            line = f"aux_layers {sources.aux_layers}: this draft reads none"
            fields.add_problem(f"{line} ({source})")
        sources.ignore("this draft reads the target's hidden after its final norm", *TAP_KEYS)
        return entry == "fc" or sources.has("fc.weight"), ()
    return True, _resolve_taps(sources, _num_taps(sources, Dt))


def _num_taps(sources: Sources, Dt: int) -> int | None:
    width = sources.dim("fc.weight", 1)
    if width is None or Dt <= 0:
        return None
    if width % Dt:
        line = f"takes {width} channels, no multiple of the target's hidden size {Dt}"
        sources.fields.problems.add(f"{sources.held['fc.weight'].where} {line}")
        return None
    return width // Dt


def _resolve_taps(sources: Sources, num_taps: int | None) -> tuple[int, ...]:
    """Which hidden states of the target a draft reads: boundary i is the stream entering layer i.

    Files name them as boundaries, or by the layer whose output it is (boundary - 1), and the two
    look alike. The target's family decides, or else the format; an id equal to the number of layers
    can only be a boundary.
    num_taps: how many fc takes, None if unknown
    """
    fields = sources.fields
    L = sources.target.num_layers if sources.target else None
    key = fields.first(*TAP_KEYS)
    ids = fields.ints(key, TAPPED_LAYERS) if key else None
    if sources.aux_layers is not None:
        boundaries, source = sources.aux_layers, "argument aux_layers (boundaries)"
    elif key and ids:
        boundaries, source = _from_ids(ids, sources, fields.source(key))
        is_moved = boundaries != ids
        other = ids if is_moved else tuple(i + 1 for i in ids)
        if L is None or max(other) <= L:
            meant = "boundaries" if is_moved else "outputs of layers"
            line = f"{OTHER_TAPS} {meant} would be the boundaries {list(other)}"
            sources.log.note(f"{line}: if drafts agree too seldom, give these as aux_layers")
    elif L is None:
        default = "default, depends on the target's L layers"
        sources.log.add("aux_boundaries", "(2, L//2, L-3)", default)
        return ()
    else:
        boundaries, source = (2, L // 2, L - 3), "default (2, L//2, L-3)"
    sources.log.add("aux_boundaries", boundaries, source)
    if num_taps is not None and len(boundaries) != num_taps:
        fields.problems.add(
            f"{sources.held['fc.weight'].where} takes {num_taps} hidden states of the target, "
            f"{len(boundaries)} layers {boundaries} come from {source}: list as many in "
            f"config.json's {key or TAP_KEYS[0]}, or in Python's aux_layers"
        )
    named = f"boundaries {boundaries} from {source}"
    if len(set(boundaries)) < len(boundaries):
        fields.add_problem(f"{named} name a layer more than once")
    if L is not None and not all(0 <= boundary <= L for boundary in boundaries):
        fields.add_problem(f"{named} must lie in 0..{L}, the target has {L} layers")
    return boundaries


def _from_ids(ids: tuple[int, ...], sources: Sources, source: str) -> tuple[tuple[int, ...], str]:
    target, layout = sources.target, sources.layout
    L = None if target is None else target.num_layers
    if target is not None and FAMILIES[target.model_type].names_boundaries:
        title = FAMILIES[target.model_type].title
        return ids, f"{source} (boundaries, as all heads for {title} have them)"
    if layout.layer_ids == "boundary":
        return ids, f"{source} (boundaries, as {layout.name} has them)"
    if L is not None and max(ids) == L:
        return ids, f"{source} (boundaries: {L} layers, and {L} is no layer's output)"
    meaning = f"outputs of layers, as {layout.name} has them, +1"
    return tuple(i + 1 for i in ids), f"{source} {list(ids)} ({meaning})"


def _fc_bias(sources: Sources, entry: str) -> bool:
    # some engines read `bias` of an EAGLE-3 config as the attention's
    keys = ("eagle_fc_bias", "fusion_bias", "bias") if entry == "fc" else ("fusion_bias",)
    return sources.flag("fc_bias", sources.fields.first(*keys), "fc.bias")


def _owns(sources: Sources, field: str, name: str) -> bool:
    found = sources.has(name)
    sources.log.add(field, found, sources.presence(name) + ("" if found else ": the target's"))
    return found


def _check_borrowing(config: EagleConfig, sources: Sources) -> None:
    fields = sources.fields
    files = file_names(sources.held)
    D = config.layer.hidden_size
    Dt = config.target_hidden_size
    V = config.vocab_size
    W = config.draft_vocab_size
    if not config.has_own_embedding and Dt != D:
        needed = f"missing embed_tokens.weight [{V}, {D}]"
        fields.problems.add(f"{files}: {needed}: the target's, of width {Dt}, does not fit")
    if not config.has_own_head and (Dt != D or W != V):
        needed = f"missing lm_head.weight [{W}, {D}]"
        fields.problems.add(f"{files}: {needed}: the target's, [{V}, {Dt}], does not fit")
    if config.entry == "fc" and Dt != D:
        fields.add_problem(
            f"an EAGLE-1 draft of hidden size {D} for a target of {Dt}: fc reads the hidden states "
            "of both models, so they must have one size"
        )
    if not config.has_fc and Dt != D:
        line = f"no fc: a draft of hidden size {D} cannot read the target's hidden of {Dt}"
        fields.problems.add(f"{files}: {line}")
