"""Which hidden states of the target a draft reads, as boundaries: boundary i is the residual stream entering layer i.

Files name them in two ways that look alike: as boundaries, or by the layer whose output it is (boundary - 1). The
format decides; an id equal to the number of layers can only be a boundary. The report says what was
decided.
"""

from weights.draft.layouts import Layout
from weights.errors import Problems
from weights.fields import Fields, Range
from weights.report import Log

KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
LAYERS = Range(0, 2**31 - 1)  # -1, the output before the first layer, is none


def resolve_taps(
    fields: Fields,
    layout: Layout,
    num_taps: int | None,
    num_target_layers: int | None,
    aux_layers: tuple[int, ...] | None,
    log: Log,
) -> tuple[int, ...]:
    """The boundaries, ascending or as written.

    num_taps:          how many fc takes, None if that cannot be told
    num_target_layers: None where the target is not known (inspecting a draft alone)
    aux_layers:        boundaries that the caller insists on
    """
    key = next((key for key in KEYS if key in fields), None)
    ids = fields.ints(key, LAYERS) if key else None
    if aux_layers is not None:
        boundaries, source = aux_layers, "argument aux_layers (boundaries)"
    elif ids:
        boundaries, source = _from_ids(ids, layout, num_target_layers, fields.source(key or ""))
    elif num_target_layers is None:
        log.add("aux_boundaries", "(2, L//2, L-3)", "default, depends on the target's L layers")
        return ()
    else:
        boundaries, source = (
            (2, num_target_layers // 2, num_target_layers - 3),
            "default (2, L//2, L-3)",
        )
    log.add("aux_boundaries", boundaries, source)
    _check(boundaries, num_taps, num_target_layers, source, fields.problems)
    return boundaries


def _from_ids(
    ids: tuple[int, ...], layout: Layout, L: int | None, source: str
) -> tuple[tuple[int, ...], str]:
    if layout.layer_ids == "boundary":
        return ids, f"{source} (boundaries, as {layout.name} has them)"
    if L is not None and max(ids) == L:
        return ids, f"{source} (boundaries: {L} layers, and {L} is no layer's output)"
    return tuple(
        i + 1 for i in ids
    ), f"{source} {list(ids)} (outputs of layers, as {layout.name} has them, +1)"


def _check(
    boundaries: tuple[int, ...],
    num_taps: int | None,
    L: int | None,
    source: str,
    problems: Problems,
) -> None:
    if num_taps is not None and len(boundaries) != num_taps:
        problems.add(
            f"fc.weight takes {num_taps} hidden states of the target, {len(boundaries)} layers {boundaries} come from "
            f"{source}: pass aux_layers"
        )
    if len(set(boundaries)) < len(boundaries):
        problems.add(f"boundaries {boundaries} from {source} name a layer more than once")
    if L is not None and not all(0 <= boundary <= L for boundary in boundaries):
        problems.add(
            f"boundaries {boundaries} from {source} must lie in 0..{L}, the target has {L} layers"
        )
