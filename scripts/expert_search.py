"""Every candidate's tiles in the products of a layer of experts, timed on a GPU.

Both products run from ids that are given: there is no router, and no norm. The first product's
candidates are timed beside one of the second's, then these beside the best of the first's.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch

from specdec.bench.experts import INPUTS, Sizes, draw_layers
from specdec.bench.report import Row
from specdec.bench.timing import per_call_ms
from specdec.kernels import triton
from specdec.kernels.compilations import compiling_ahead
from specdec.kernels.experts.products import launch_expert_parts
from specdec.kernels.experts.tiles import (
    ROWS,
    ExpertTiles,
    candidates,
    class_of,
    few_rows,
)
from specdec.kernels.experts.weight import Form
from specdec.kernels.tile_shapes import Shape


def search(sizes: Sizes, T: int, device: torch.device) -> Iterator[Row]:
    """Yield a row for each pair of tiles that is timed; the first one is the rule's."""
    layers = draw_layers(sizes, device)
    x = torch.randn(T, sizes.D, device=device).to(layers[0].router.dtype)
    drawn = (torch.rand(T, sizes.E, device=device) for _ in range(INPUTS))
    all_ids = [each.topk(sizes.k).indices.int() for each in drawn]
    launch = partial(launch_expert_parts, x)
    turns = [(ids, *layer[2:5]) for layer in layers for ids in all_ids]

    def time(tiles: ExpertTiles | None) -> float:
        """Time both products in microseconds; infinite if these tiles do not run."""
        try:
            return 1e3 * per_call_ms(device, [partial(launch, *turn, tiles) for turn in turns])
        except torch.AcceleratorError:  # after it no call on this GPU succeeds
            raise
        except (RuntimeError, triton.errors.TritonError):
            return math.inf

    def row(tiles: ExpertTiles | None) -> Row:
        us = time(tiles)
        named: Row = {"model": sizes.model, "rows": T, "us": us if us < math.inf else None}
        return named | {"tiles": "rule" if tiles is None else tiles}

    yield row(None)
    for first, second, is_sorted in _ways(sizes, T):
        beside_second = [ExpertTiles(gate, second[0], is_sorted) for gate in first]
        with compiling_ahead(device, progress=False, may_fail=True):
            for tiles in (
                *beside_second,
                *(ExpertTiles(first[0], down, is_sorted) for down in second[1:]),
            ):
                launch(*turns[0], tiles)
        times = {tiles.gate_up: time(tiles) for tiles in beside_second}
        best = min(first, key=times.__getitem__)
        for down in second:
            yield row(ExpertTiles(best, down, is_sorted))


def _ways(sizes: Sizes, T: int) -> Iterator[tuple[list[Shape], list[Shape], bool]]:
    """Give both products' candidates, and whether pairs are sorted."""
    E, k, D, I, is_packed = sizes[1:]
    form: Form = "packed" if is_packed else "plain"

    def both(block_m: int) -> tuple[list[Shape], list[Shape]]:
        gate_up = candidates("gate_up", block_m, D, form)
        return gate_up, candidates("down", block_m, I, form)

    if few_rows(form) >= T:
        yield *both(class_of(T)), False
    mean = T * k / E
    for block_m in ROWS:
        if min(mean / 4, max(ROWS)) <= block_m <= 4 * max(mean, 8):
            yield *both(block_m), True
