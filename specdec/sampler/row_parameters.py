"""Limits and noise keys of the rows of a step, gathered from the state rows in one launch.

The drawn token of a row comes one position later; that of a draft level comes `offset` after the
request's computed tokens. A round under p/q draws its own numbers, since block verification looks
at coins and drafts after the end of what it accepts: its epoch is the position where the round
begins. Under "exact" the epoch is 0, so that the noise depends on the position alone. Padding reads
the scratch row, which is greedy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, tl, use_triton
from specdec.kernels.choose_token import NoiseKeys
from specdec.kernels.overlap import begin
from specdec.kernels.support_floor import Limits
from specdec.rounds.state import RequestState


class TextPositions(NamedTuple):
    """Where rows are in their texts."""

    positions: Tensor  # [T]
    starts: Tensor  # [T] the row at which a round of p/q begins; its position is the epoch


def row_parameters(
    state: RequestState,
    state_T: Tensor,
    places: TextPositions | None,
    offset: int,
    stream: int,
    has_epoch: bool,
) -> tuple[Limits, NoiseKeys]:
    """Gather the limits and noise keys of T rows, whose drawn tokens come `offset` after them.

    state_T: state row of every row, -1 = padding
    places:  None: a row comes after its request's computed tokens, and is a round of its own
    """
    if not use_triton(state_T):
        return row_parameters_ref(state, state_T, places, offset, stream, has_epoch)
    assert state_T.is_contiguous(), state_T.stride()
    sampling = state.sampling
    T = len(state_T)
    floats = sampling.floats.new_empty(3, T)
    integers = sampling.integers.new_empty(5, T)
    tensors = floats, integers, sampling.floats, sampling.integers, state_T
    _row_parameters_kernel[(-(-T // 128),)](
        *tensors,
        *((state.num_computed_tokens, state_T) if places is None else places),
        *(sampling.floats.stride(0), sampling.integers.stride(0), len(sampling.floats) - 1),
        T,
        offset,
        BY_ROW=places is None,
        HAS_EPOCH=has_epoch,
        BLOCK=128,
        num_warps=4,
        **launch_options(state_T),
    )
    limits = Limits(temperatures=floats[0], log_min_p=floats[1], top_p=floats[2], top_k=integers[0])
    noise_keys = NoiseKeys(
        temperatures=floats[0],
        seeds=integers[1:3].view(T, 2),
        positions=integers[3],
        epochs=integers[4],
        stream=stream,
    )
    return limits, noise_keys


@jit(varying=("T", "offset"))
def _row_parameters_kernel(
    floats_ptr,  # [3, T] temperature, log_min_p, top_p
    integers_ptr,  # [5, T] top_k, [T, 2] halves of the seed, position, epoch
    row_floats_ptr,  # [R + 1, >= 3] the same three
    row_integers_ptr,  # [R + 1, >= 3] seed in halves, top_k
    states_ptr,  # [T]
    positions_ptr,  # [T], or [R + 1] BY_ROW
    starts_ptr,  # [T]
    stride_floats,
    stride_integers,
    R,
    T,
    offset,
    BY_ROW: tl.constexpr,
    HAS_EPOCH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < T
    idx = tl.load(states_ptr + t, mask=inside, other=-1)
    row = tl.where(idx < 0, R, idx)
    for i in tl.static_range(3):
        value = tl.load(row_floats_ptr + row * stride_floats + i)
        tl.store(floats_ptr + i * T + t, value, mask=inside)
    tl.store(integers_ptr + t, tl.load(row_integers_ptr + row * stride_integers + 2), mask=inside)
    for i in tl.static_range(2):
        half = tl.load(row_integers_ptr + row * stride_integers + i)
        tl.store(integers_ptr + T + 2 * t + i, half, mask=inside)
    position = tl.load(positions_ptr + (row if BY_ROW else t), mask=inside, other=0)
    tl.store(integers_ptr + 3 * T + t, position + offset, mask=inside)
    epoch = tl.zeros_like(position)
    if HAS_EPOCH:
        first = row if BY_ROW else tl.load(starts_ptr + t, mask=inside, other=0)
        epoch = tl.load(positions_ptr + first, mask=inside, other=0)
    tl.store(integers_ptr + 4 * T + t, epoch, mask=inside)


def row_parameters_ref(
    state: RequestState,
    state_T: Tensor,
    places: TextPositions | None,
    offset: int,
    stream: int,
    has_epoch: bool,
) -> tuple[Limits, NoiseKeys]:
    sampling = state.sampling
    position_T = state.num_computed_tokens[state_T] if places is None else places.positions
    epoch_T = torch.zeros_like(position_T)
    if has_epoch:
        epoch_T = position_T if places is None else position_T[places.starts]
    kept = (sampling.temperature, sampling.log_min_p, sampling.top_k, sampling.top_p)
    limits = Limits(*(values[state_T] for values in kept))
    noise_keys = NoiseKeys(
        temperatures=limits.temperatures,
        seeds=sampling.seeds[state_T],
        positions=position_T + offset,
        epochs=epoch_T,
        stream=stream,
    )
    return limits, noise_keys
