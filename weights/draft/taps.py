"""Which hidden states of the target a draft reads, as boundaries: i is the stream entering layer i.

Files name them as boundaries, or by the layer whose output it is (boundary - 1), and the two look
alike. The format decides; an id equal to the number of layers can only be a boundary.
"""

from weights.draft.layouts import Layout
from weights.draft.sources import Sources
from weights.fields import Range

KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
LAYERS = Range(0, 2**31 - 1)  # -1, the output before the first layer, is none


def resolve_taps(sources: Sources, num_taps: int | None) -> tuple[int, ...]:
    """The boundaries, ascending or as written. num_taps: how many fc takes, None if unknown."""
    fields = sources.fields
    L = sources.target.num_layers if sources.target else None
    key = fields.first(*KEYS)
    ids = fields.ints(key, LAYERS) if key else None
    if sources.aux_layers is not None:
        boundaries, source = sources.aux_layers, "argument aux_layers (boundaries)"
    elif key and ids:
        boundaries, source = _from_ids(ids, sources.layout, L, fields.source(key))
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
            f"config.json's {key or KEYS[0]}, or in Python's aux_layers"
        )
    named = f"boundaries {boundaries} from {source}"
    if len(set(boundaries)) < len(boundaries):
        fields.add_problem(f"{named} name a layer more than once")
    if L is not None and not all(0 <= boundary <= L for boundary in boundaries):
        fields.add_problem(f"{named} must lie in 0..{L}, the target has {L} layers")
    return boundaries


def _from_ids(
    ids: tuple[int, ...], layout: Layout, L: int | None, source: str
) -> tuple[tuple[int, ...], str]:
    if layout.layer_ids == "boundary":
        return ids, f"{source} (boundaries, as {layout.name} has them)"
    if L is not None and max(ids) == L:
        return ids, f"{source} (boundaries: {L} layers, and {L} is no layer's output)"
    meaning = f"outputs of layers, as {layout.name} has them, +1"
    return tuple(i + 1 for i in ids), f"{source} {list(ids)} ({meaning})"
