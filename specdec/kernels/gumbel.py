"""Gumbel noise: a function of (seed, position of the drawn token, token id, stream) only.

r = Philox4x32-10 with key = seed (64 bits), counter = (token_id >> 2, position, stream, epoch) and
    lane token_id & 3
e = -log1p(-(r + 0.5) / 2^32) for r < 2^31, else -log((2^32 - 0.5 - r) / 2^32)
g = -log(e)

All in float32 from additions, products and one division, each rounded once, so that twin,
interpreter and GPU give the same bits; a library's log differs between them, on a CPU even between
the body of a vector and its tail. Kernels that call `gumbel_noise` are launched with
enable_fp_fusion=False: a fused multiply-add would round once less.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, tl

# streams: what a number is drawn for
TARGET, DRAFT, COIN, RESIDUAL, BONUS = range(5)

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


# log(1 + m) = m - m^2 / 2 + m^3 P(m) for m in [sqrt(1/2) - 1, sqrt(2) - 1], and ln 2 in two parts
# (Cephes, logf); each number is rounded to float32, as natural_log has it
SQRT_HALF = 0.7071067690849304
LOG_P = (
    *(0.07037683576345444, -0.11514610052108765, 0.11676998436450958, -0.12420140951871872),
    *(0.14249323308467865, -0.16668057441711426, 0.2000071406364441, -0.24999994039535522),
    0.3333333134651184,
)
LN2_LOW = -0.00021219444170128554
LN2_HIGH = 0.693359375


def gumbel_ref(
    seeds_X2: Tensor,
    positions_X: Tensor,
    token_ids_XN: Tensor,
    stream: int,
    epochs_X: Tensor | None = None,
) -> Tensor:
    """Compute the noise [X, N] of these tokens.

    seeds_X2: low and high 32 bits. token_ids_XN may be [1, N].
    """
    words = _words(seeds_X2, positions_X, token_ids_XN >> 2, stream, epochs_X)
    lane_XN = (token_ids_XN & 3).expand_as(words[0])
    draws_XN = torch.stack(words, dim=-1).gather(-1, lane_XN[..., None])[..., 0]
    return noise_of_bits_ref(draws_XN)


def gumbel_of_all_ref(
    seeds_X2: Tensor,
    positions_X: Tensor,
    num_tokens: int,
    stream: int,
    epochs_X: Tensor,
    first: int = 0,
) -> Tensor:
    """Compute the noise [X, N] of N tokens from `first` on; four of them share a block of Philox.

    first: a multiple of 4
    """
    assert first % 4 == 0, first
    blocks_1N = torch.arange(-(-num_tokens // 4), device=seeds_X2.device)[None] + first // 4
    words = _words(seeds_X2, positions_X, blocks_1N, stream, epochs_X)
    return noise_of_bits_ref(torch.stack(words, dim=-1).flatten(1)[:, :num_tokens])


def uniform_ref(
    seeds_X2: Tensor, positions_X: Tensor, stream: int, epochs_X: Tensor | None = None
) -> Tensor:
    """Draw (r + 0.5) / 2^32 for each position, [X] float64, exact; r is Philox's first lane."""
    block_11 = torch.zeros(1, 1, dtype=torch.int64, device=seeds_X2.device)
    draws_X = _words(seeds_X2, positions_X, block_11, stream, epochs_X)[0][:, 0]
    return (draws_X.double() + 0.5) / 2.0**32


def _words(
    seeds_X2: Tensor, positions_X: Tensor, blocks_XN: Tensor, stream: int, epochs_X: Tensor | None
) -> tuple[Tensor, ...]:
    epochs_X = torch.zeros_like(positions_X) if epochs_X is None else epochs_X
    blocks_XN = blocks_XN.expand(len(seeds_X2), -1)
    streams_X = torch.full_like(positions_X, stream)
    counter = (blocks_XN, positions_X[:, None], streams_X[:, None], epochs_X[:, None])
    return philox_ref((seeds_X2[:, :1], seeds_X2[:, 1:]), counter)


def philox_ref(key: tuple[Tensor, Tensor], counter: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute Philox4x32-10 in int64; every number is one of 32 bits, shapes broadcast."""
    k0, k1 = key
    a, b, c, d = counter
    for _ in range(10):
        # bits beyond 63 wrap, and the others stay right
        first = a * MULTIPLIERS[0]
        second = c * MULTIPLIERS[1]
        a, c = (second >> 32 & MASK) ^ b ^ k0, (first >> 32 & MASK) ^ d ^ k1
        b, d = second & MASK, first & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    a, b, c, d = torch.broadcast_tensors(a, b, c, d)
    return a, b, c, d


def noise_of_bits_ref(draws: Tensor) -> Tensor:
    """Compute g of 32-bit draws (int64), float32."""
    is_low = draws < 1 << 31
    x = (torch.where(is_low, draws, MASK - draws).float() + 0.5) * 2.0**-32
    u = torch.where(is_low, 1 - x, x)
    log_u = log_ref(u)
    # what 1 - x lost in rounding
    log_u = torch.where(is_low, log_u + ((1 - u) - x) / u, log_u)
    return -log_ref(-log_u)


def log_ref(x: Tensor) -> Tensor:
    """Take the natural logarithm of normal positive float32, to two units in the last place."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) - 126
    half = ((bits & 0x7FFFFF) | 0x3F000000).view(torch.float32)
    is_small = half < SQRT_HALF
    k = (exponent - is_small.int()).float()
    m = torch.where(is_small, half + half, half) - 1
    p = torch.full_like(m, LOG_P[0])
    for coefficient in LOG_P[1:]:
        p = p * m + coefficient
    square = m * m
    y = p * m * square + k * LN2_LOW
    y = y - square * 0.5
    return (m + y) + k * LN2_HIGH


@jit
def philox(k0, k1, a, b, c, d):
    """Compute Philox4x32-10 over uint32 tensors of one shape."""
    for _ in tl.static_range(10):
        first_high, first_low = tl.umulhi(a, 0xD2511F53), a * 0xD2511F53
        second_high, second_low = tl.umulhi(c, 0xCD9E8D57), c * 0xCD9E8D57
        a, b = second_high ^ b ^ k0, second_low
        c, d = first_high ^ d ^ k1, first_low
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return a, b, c, d


@jit
def gumbel_noise(r):
    is_low = r < 0x80000000
    distance = tl.where(is_low, r, 0xFFFFFFFF - r).to(tl.int32).to(tl.float32)
    x = (distance + 0.5) * 2.3283064365386963e-10
    u = tl.where(is_low, 1.0 - x, x)
    log_u = natural_log(u)
    log_u = tl.where(is_low, log_u + tl.div_rn((1.0 - u) - x, u), log_u)
    return -natural_log(-log_u)


@jit
def gumbel_estimate(r, IS_GPU: tl.constexpr):
    """Estimate g within 1e-4, by the hardware's logarithm: it rules out most tokens."""
    is_low = r < 0x80000000
    distance = tl.where(is_low, r, 0xFFFFFFFF - r).to(tl.int32).to(tl.float32)
    x = distance * 2.3283064365386963e-10 + 1.1641532182693481e-10
    e = -0.6931471805599453 * _log2_estimate(tl.where(is_low, 1.0 - x, x), IS_GPU)
    # the hardware's error near 1 is absolute, and e is small there
    e = tl.where(is_low & (x < 0.015625), x * (1.0 + x * (0.5 + x * 0.33333333)), e)
    return -0.6931471805599453 * _log2_estimate(e, IS_GPU)


@jit
def _log2_estimate(x, IS_GPU: tl.constexpr):
    if IS_GPU:
        return tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@jit
def natural_log(x):
    """The kernel of log_ref."""
    bits = x.to(tl.int32, bitcast=True)
    half = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    is_small = half < 0.7071067690849304
    k = ((bits >> 23) - 126 - is_small.to(tl.int32)).to(tl.float32)
    m = tl.where(is_small, half + half, half) - 1.0
    p = m * 0.07037683576345444 + -0.11514610052108765
    p = p * m + 0.11676998436450958
    p = p * m + -0.12420140951871872
    p = p * m + 0.14249323308467865
    p = p * m + -0.16668057441711426
    p = p * m + 0.2000071406364441
    p = p * m + -0.24999994039535522
    p = p * m + 0.3333333134651184
    square = m * m
    y = p * m * square + k * -0.00021219444170128554
    y = y - square * 0.5
    return (m + y) + k * 0.693359375
