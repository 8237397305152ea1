"""Which hidden states of the target a draft reads: boundary i is the stream entering layer i.

Files name them as boundaries, or by the layer whose output it is (boundary - 1), and the two look
alike. The target's family decides, or else the format; an id equal to the number of layers can only
be a boundary.
"""

from collections.abc import Callable
from dataclasses import dataclass

from weights.draft.layouts import Format
from weights.draft.sources import Sources
from weights.families.table import FAMILIES
from weights.fields import Range
from weights.report import OTHER_TAPS

TAP_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
MOST_LAYERS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """The boundaries of a draft whose config names none, by the target's number of layers."""

    boundaries: Callable[[int], tuple[int, ...]]
    words: str


EAGLE3 = Default(boundaries=lambda L: (2, L // 2, L - 3), words="(2, L//2, L-3)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TapRules:
    """How a format's ids are read.

    default:        None: the config must name them
    least:          the smallest id; -1 is the output before the first layer
    family_decides: heads for some families have boundaries, whatever wrote them
    """

    format: Format
    default: Default | None = EAGLE3
    least: int = 0
    family_decides: bool = True


def num_taps(sources: Sources, Dt: int) -> int | None:
    """Count the hidden states that fc takes; None if unknown."""
    width = sources.dim("fc.weight", 1)
    if width is None or Dt <= 0:
        return None
    if width % Dt:
        line = f"takes {width} channels, no multiple of the target's hidden size {Dt}"
        sources.fields.problems.add(f"{sources.held['fc.weight'].where} {line}")
        return None
    return width // Dt


def resolve_taps(sources: Sources, rules: TapRules, num_taps: int | None) -> tuple[int, ...]:
    """Find the boundaries. num_taps: how many fc takes, None if unknown"""
    fields = sources.fields
    L = sources.target.num_layers if sources.target else None
    key = fields.first(*TAP_KEYS)
    ids = fields.ints(key, Range(rules.least, MOST_LAYERS)) if key else None
    if sources.aux_layers is not None:
        boundaries, source = sources.aux_layers, "argument aux_layers (boundaries)"
    elif key and ids:
        boundaries, source = _from_ids(ids, sources, rules, fields.source(key))
        is_moved = boundaries != ids
        other = ids if is_moved else tuple(i + 1 for i in ids)
        if min(other) >= 0 and (L is None or max(other) <= L):
            meant = "boundaries" if is_moved else "outputs of layers"
            line = f"{OTHER_TAPS} {meant} would be the boundaries {list(other)}"
            sources.log.note(f"{line}: if drafts agree too seldom, give these as aux_layers")
    elif rules.default is None:
        fields.add_problem(f"missing {key or TAP_KEYS[1]} (a list of integers)", fatal=True)
        return ()
    elif L is None:
        default = "default, depends on the target's L layers"
        sources.log.add("aux_boundaries", rules.default.words, default)
        return ()
    else:
        boundaries = rules.default.boundaries(L)
        source = f"default {rules.default.words}"
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


def _from_ids(
    ids: tuple[int, ...], sources: Sources, rules: TapRules, source: str
) -> tuple[tuple[int, ...], str]:
    target, name = sources.target, rules.format.name
    L = None if target is None else target.num_layers
    if rules.family_decides and target is not None and FAMILIES[target.model_type].names_boundaries:
        title = FAMILIES[target.model_type].title
        return ids, f"{source} (boundaries, as all heads for {title} have them)"
    if rules.format.layer_ids == "boundary":
        return ids, f"{source} (boundaries, as {name} has them)"
    if rules.family_decides and L is not None and max(ids) == L:
        return ids, f"{source} (boundaries: {L} layers, and {L} is no layer's output)"
    meaning = f"outputs of layers, as {name} has them, +1"
    return tuple(i + 1 for i in ids), f"{source} {list(ids)} ({meaning})"
