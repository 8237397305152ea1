"""Limits and noise keys of the rows of a step, gathered from the state rows in one launch.

Rows come in consecutive runs, one per batch slot. The drawn token of a row comes one position
later; that of a draft level comes `offset` after the request's computed tokens. A round under p/q
draws its own numbers, since block verification looks at coins and drafts after the end of what it
accepts: its epoch is the position where the round begins. Under "exact" the epoch is 0, so that the
noise depends on the position alone. Padding reads the scratch row, which is greedy.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, pick, tl
from specdec.kernels.choose_token import NoiseKeys
from specdec.kernels.overlap import begin
from specdec.kernels.support_floor.floor import Limits
from specdec.stepping.state import RequestState


def row_parameters(
    state: RequestState,
    row_B: Tensor,
    position_BQ: Tensor | None,
    offset: int,
    stream: int,
    has_epoch: bool,
) -> tuple[Limits, NoiseKeys]:
    """Of T = B x Q rows, whose drawn tokens come `offset` after their positions.

    row_B:       state row per batch slot, -1 = padding
    position_BQ: None: one row per slot, after the request's computed tokens
    """
    gather = pick(row_B, launch_row_parameters, row_parameters_ref)
    return gather(state, row_B, position_BQ, offset, stream, has_epoch)


def launch_row_parameters(
    state: RequestState,
    row_B: Tensor,
    position_BQ: Tensor | None,
    offset: int,
    stream: int,
    has_epoch: bool,
) -> tuple[Limits, NoiseKeys]:
    sampling = state.sampling
    Q = 1 if position_BQ is None else position_BQ.shape[1]
    T = len(row_B) * Q
    floats = sampling.floats.new_empty(3, T)
    integers = sampling.integers.new_empty(5, T)
    _row_parameters_kernel[(-(-T // 128),)](
        floats,
        integers,
        sampling.floats,
        sampling.integers,
        row_B,
        state.num_computed_tokens if position_BQ is None else position_BQ,
        sampling.floats.stride(0),
        sampling.integers.stride(0),
        len(sampling.floats) - 1,
        Q,
        T,
        offset,
        BY_ROW=position_BQ is None,
        HAS_EPOCH=has_epoch,
        BLOCK=128,
        num_warps=4,
        **launch_options(row_B),
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


@jit(varying=("Q", "T", "offset"))
def _row_parameters_kernel(
    floats_ptr,  # [3, T] temperature, log_min_p, top_p
    integers_ptr,  # [5, T] top_k, [T, 2] halves of the seed, position, epoch
    row_floats_ptr,  # [R + 1, >= 3] the same three
    row_integers_ptr,  # [R + 1, >= 3] seed in halves, top_k
    idx_ptr,  # [B]
    positions_ptr,  # [T], or [R + 1] BY_ROW
    stride_floats,
    stride_integers,
    R,
    Q,
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
    idx = tl.load(idx_ptr + t // Q, mask=inside, other=-1)
    row = tl.where(idx < 0, R, idx)
    for i in tl.static_range(3):
        value = tl.load(row_floats_ptr + row * stride_floats + i)
        tl.store(floats_ptr + i * T + t, value, mask=inside)
    tl.store(integers_ptr + t, tl.load(row_integers_ptr + row * stride_integers + 2), mask=inside)
    for i in tl.static_range(2):
        half = tl.load(row_integers_ptr + row * stride_integers + i)
        tl.store(integers_ptr + T + 2 * t + i, half, mask=inside)
    at = row if BY_ROW else t
    first = row if BY_ROW else t // Q * Q
    position = tl.load(positions_ptr + at, mask=inside, other=0)
    tl.store(integers_ptr + 3 * T + t, position + offset, mask=inside)
    epoch = tl.load(positions_ptr + first, mask=inside, other=0) if HAS_EPOCH else 0
    tl.store(integers_ptr + 4 * T + t, epoch, mask=inside)


def row_parameters_ref(
    state: RequestState,
    row_B: Tensor,
    position_BQ: Tensor | None,
    offset: int,
    stream: int,
    has_epoch: bool,
) -> tuple[Limits, NoiseKeys]:
    sampling = state.sampling
    base_BQ = state.num_computed_tokens[row_B][:, None] if position_BQ is None else position_BQ
    row_T = row_B[:, None].expand_as(base_BQ).flatten()
    epoch_BQ = base_BQ[:, :1] if has_epoch else torch.zeros_like(base_BQ)
    kept = (sampling.temperature, sampling.log_min_p, sampling.top_k, sampling.top_p)
    limits = Limits(*(values[row_T] for values in kept))
    noise_keys = NoiseKeys(
        temperatures=limits.temperatures,
        seeds=sampling.seeds[row_T],
        positions=base_BQ.flatten() + offset,
        epochs=epoch_BQ.expand_as(base_BQ).flatten(),
        stream=stream,
    )
    return limits, noise_keys
