"""Every candidate's tiles in the products of a layer of experts, timed on a GPU.

Both products run from ids that are given: there is no router, and no norm. Tiles are tried in each
way that reads rows (`way_of`). The first product's candidates are timed beside one of the second's,
then these beside the best of the first's. What gives other bits than the rule's tiles is not timed.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from specdec.bench.experts import INPUTS, Sizes, draw_layers
from specdec.bench.report import Row
from specdec.bench.timing import per_call_ms
from specdec.kernels import triton
from specdec.kernels.compilations import compiling_ahead
from specdec.kernels.experts.products import launch_expert_parts
from specdec.kernels.experts.tiles import (
    FEW_ROWS,
    PERSISTENT_ROWS,
    ROWS,
    ExpertTiles,
    candidates,
    class_of,
    persistent_candidates,
)
from specdec.kernels.tile_shapes import Shape

LIKELY = 3  # candidates that are tried in other ways than today's
BEST = 3  # of a way that are shown
Way = tuple[list[Shape], list[Shape], ExpertTiles]


def search(sizes: Sizes, T: int, device: torch.device) -> Iterator[Row]:
    """Yield a row for each pair of tiles that is timed; the first one is the rule's."""
    layers = draw_layers(sizes, device)
    x = torch.randn(T, sizes.D, device=device).to(layers[0].down.dtype)
    drawn = (torch.rand(T, sizes.E, device=device) for _ in range(INPUTS if T <= 1024 else 1))
    all_ids = [each.topk(sizes.k).indices.int() for each in drawn]
    launch = partial(launch_expert_parts, x)
    turns = [(ids, layer.gate_up, layer.down) for layer in layers for ids in all_ids]
    expected = launch(*turns[0])

    def time(tiles: ExpertTiles | None) -> float | str:
        """Time both products in microseconds, or say why these tiles do not run."""
        try:
            if not torch.equal(launch(*turns[0], tiles), expected):
                return "other bits than the rule's"
            return 1e3 * per_call_ms(device, [partial(launch, *turn, tiles) for turn in turns])
        except torch.AcceleratorError:  # after it no call on this GPU succeeds
            raise
        except (RuntimeError, triton.errors.TritonError) as error:
            return f"{type(error).__name__}: {error}"

    def row(tiles: ExpertTiles | None) -> Row:
        us = time(tiles)
        named: Row = {"model": sizes.model, "rows": T, "way": way_of(tiles)}
        named |= {"problem": us} if isinstance(us, str) else {"us": us}
        return named | {"tiles": "rule" if tiles is None else tiles}

    yield row(None)
    ways = list(_ways(sizes, T))
    with compiling_ahead(device, progress=False, may_fail=True):
        for first, second, way in ways:
            for gate, down in itertools.zip_longest(first, second):
                tiles = way._replace(gate_up=gate or first[0], down=down or second[0])
                launch(*turns[0], tiles)
    for first, second, way in ways:
        rows = [row(way._replace(gate_up=gate, down=second[0])) for gate in first]
        yield from rows
        best = rows[min(range(len(rows)), key=lambda i: rows[i].get("us", math.inf))]
        for down in second[1:]:
            yield row(best["tiles"]._replace(down=down))


def way_of(tiles: ExpertTiles | None) -> str:
    """Name how rows are read, and by which kernels."""
    if tiles is None:
        return "rule"
    placed = tiles.h_by_place + tiles.x_by_place
    roles = " ".join(part for part in ("gate_up", "down") if getattr(tiles, part).cuts)
    name = ("gathers", "h by place", "x and h by place")[placed] if tiles.is_sorted else "unsorted"
    return f"{name}, persistent {roles}" if roles else name


def best_of_each(rows: Sequence[Row]) -> Iterator[str]:
    """Make lines of the fastest tiles of each model, number of rows and way."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["rows"], row["way"]), []).append(row)
    for (model, T, way), group in groups.items():
        timed = sorted((row for row in group if "us" in row), key=lambda row: row["us"])
        for row in itertools.islice(timed, BEST):
            yield f"{model} {T:>5} {row['us']:8.1f} us  {way}: {_brief(row['tiles'])}"
        problems = {str(row["problem"])[:100] for row in group if "problem" in row}
        yield from (f"{model} {T:>5} {way}: {each}" for each in sorted(problems))


def _brief(tiles: ExpertTiles | str) -> str:
    shapes = () if isinstance(tiles, str) else tiles[:2]
    return " ".join(",".join(map(str, shape)) for shape in shapes)


def _ways(sizes: Sizes, T: int) -> Iterator[Way]:
    """Give both products' candidates, and what else their tiles have; today's ways first."""
    E, k, D, I = sizes[1:]

    def both(block_m: int) -> tuple[list[Shape], list[Shape]]:
        return candidates("gate_up", block_m, D), candidates("down", block_m, I)

    def way(first: list[Shape], second: list[Shape], *how: bool) -> Way:
        return first, second, ExpertTiles(first[0], second[0], *how)

    if T <= FEW_ROWS:
        yield way(*both(class_of(T)), False)
    mean = T * k / E
    heights = [m for m in ROWS if min(mean / 2, 128) <= m <= 3 * max(mean, 16)]
    for block_m in heights:
        yield way(*both(block_m), True)
    for block_m in heights if T > FEW_ROWS else ():
        first, second = (each[:LIKELY] for each in both(block_m))
        yield way(first, second, True, True)
        yield way(first, second, True, True, True)
        if block_m in PERSISTENT_ROWS:
            yield way(first, persistent_candidates("down", block_m), True, True)
    for block_m in PERSISTENT_ROWS:
        if block_m <= 3 * mean:
            shapes = (persistent_candidates(part, block_m) for part in ("gate_up", "down"))
            yield way(*shapes, True, True, True)
