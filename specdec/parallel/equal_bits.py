"""On how many GPUs a model runs, and on how many with the bits of one.

A number of GPUs has equal bits if each takes whole splits of every o_proj and down_proj, so that
its sum is a subtree of sum_order.py. Heads, experts and rows of other weights go to GPUs whole,
which changes no sum.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from specdec.kernels.sum_order import splits_of
from weights.config import LayerKind, TargetConfig
from weights.draft.config import DraftConfig
from weights.ranks import misfits_of_layer

SIZES = (2, 4, 8)  # numbers of GPUs beside 1
ALIGN = 8  # columns of a weight's part: rows of 16-bit numbers begin at multiples of 16 bytes


class Fit(NamedTuple):
    """What a number of GPUs does for a model."""

    size: int
    bits: Literal["equal", "other", "none"]  # other: it runs, and sums in another order; none: not
    reason: str = ""  # empty if bits are equal


def fits_of(target: TargetConfig) -> list[Fit]:
    """Judge every number of GPUs for a target; its tokens depend on nothing else."""
    return [fit_of(target, size) for size in SIZES]


def fit_of(target: TargetConfig, size: int) -> Fit:
    """Judge one number of GPUs for a target."""
    return _fit(target.kinds, size)


def draft_fit_of(eagle: DraftConfig, size: int) -> Fit:
    """Judge one number of GPUs for a draft that is cut; a whole one on each always fits.

    Other bits change which tokens are drafted, and with acceptance by probabilities those that are
    drawn.
    """
    return _fit((eagle.layer,), size)


def _fit(kinds: tuple[LayerKind, ...], size: int) -> Fit:
    problem = next((found for kind in kinds for found in _problems(kind, size)), None)
    if problem is not None:
        return Fit(size, "none", problem)
    loss = next((found for kind in kinds for found in _losses(kind, size)), None)
    return Fit(size, "equal") if loss is None else Fit(size, "other", loss)


def _problems(kind: LayerKind, size: int) -> Iterator[str]:
    """Say what cannot be dealt out to so many GPUs: what loading refuses, and odd columns."""
    for misfit in misfits_of_layer(kind, size):
        yield f"{misfit.number:,} {misfit.what}"
    for name, _, columns in _row_parallel(kind):
        if columns % (size * ALIGN) != 0:
            yield f"{columns:,} columns of {name}"


def _losses(kind: LayerKind, size: int) -> Iterator[str]:
    """Say where a GPU would have a part of a split."""
    for name, N, K in _row_parallel(kind):
        splits = splits_of(N, K, kind.forms._asdict()[name] != "plain")
        if splits % size != 0:
            yield f"{name} has {splits} split{'s' * (splits > 1)}"


def _row_parallel(kind: LayerKind) -> Iterator[tuple[str, int, int]]:
    """List names and shapes [N, K] of the weights whose columns go to GPUs."""
    yield "o_proj", kind.hidden_size, kind.num_heads * kind.head_dim
    if kind.experts is None:
        yield "down_proj", kind.hidden_size, kind.intermediate_size
