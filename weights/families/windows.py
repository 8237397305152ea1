"""Which layers of a target see a window of keys alone, and how large it is."""

from itertools import cycle, islice

from weights.families.family import Family
from weights.fields import Fields, layer_types
from weights.report import Log

MAX_WINDOW_LAYERS = 28  # layers before the first window, where config.json does not say
SLIDING, FULL = "sliding_attention", "full_attention"


def read_windows(
    fields: Fields, family: Family, num_layers: int, log: Log
) -> tuple[int | None, ...]:
    """Read the window of each layer; None: the layer sees all keys."""
    kinds = layer_types(fields)
    if not kinds and family.sliding:
        turns = islice(cycle(family.sliding), num_layers)
        kinds = tuple(SLIDING if is_sliding else FULL for is_sliding in turns)
    if SLIDING in kinds and len(kinds) != num_layers:
        counts = f"layer_types has {len(kinds)} entries, and there are {num_layers} layers"
        fields.add_problem(counts, fatal=True)
        return (None,) * num_layers
    window = _window_of_layers(fields, family, SLIDING in kinds)
    if SLIDING in kinds:
        found = tuple(window if kind == SLIDING else None for kind in kinds)
    else:
        start = num_layers if kinds else _first_with_window(fields, family)
        found = tuple(window if i >= start else None for i in range(num_layers))
    source = fields.source(*filter(None, ("layer_types", family.window_switch, "sliding_window")))
    log.add("sliding_window", next(filter(None, found), None), source)
    log.add("layers_with_window", num_layers - found.count(None), source)
    return found


def _window_of_layers(fields: Fields, family: Family, has_windows: bool) -> int | None:
    """Read the window of those layers that have one. has_windows: the file lists such layers."""
    # transformers' Llama has no windows; vLLM's has those that are listed
    is_on = family.has_window or has_windows
    if family.window_switch is not None:
        is_on = fields.get(bool, family.window_switch, False)
    if not is_on or "sliding_window" in fields.nulls:
        return None
    if not family.has_window:
        return fields.need(int, "sliding_window")
    found = fields.find(int, "sliding_window")
    return family.sliding_window if found is None else found


def _first_with_window(fields: Fields, family: Family) -> int:
    if family.window_start is None:
        return 0
    return fields.get(int, family.window_start, MAX_WINDOW_LAYERS)
