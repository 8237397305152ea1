"""The noise is public: Philox by its published vectors, g by float64, some bits, twin == kernel."""

import numpy as np
import pytest
import torch

from specdec.kernels import jit, tl
from specdec.kernels.choose_token import NoiseKeys, choose_token_ref, launch_choices
from specdec.kernels.gumbel import (
    BONUS,
    COIN,
    DRAFT,
    RESIDUAL,
    TARGET,
    gumbel_estimate,
    gumbel_of_all_ref,
    gumbel_ref,
    log_ref,
    noise_of_bits_ref,
    philox_ref,
    uniform_ref,
)
from specdec.kernels.support_floor import Limits, launch_support_floor, support_floor_ref

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SEED, POSITION = 0x123456789ABCDEF, 77


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


# kat_vectors of Random123, philox4x32 10
@pytest.mark.parametrize(
    "key, counter, words",
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_is_the_published_one(key, counter, words):
    result = philox_ref(
        tuple(torch.tensor(k) for k in key), tuple(torch.tensor(c) for c in counter)
    )
    assert tuple(int(word) for word in result) == words
    assert philox_numpy(key, counter) == words


def philox_numpy(key, counter):
    """The same in Python's own integers."""
    (k0, k1), (a, b, c, d) = key, counter
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            (second >> 32) ^ b ^ k0,
            second & 0xFFFFFFFF,
            (first >> 32) ^ d ^ k1,
            first & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


def noise_numpy(seed, position, token, stream, epoch=0):
    """g by USE's formulas in float64."""
    key = (seed & 0xFFFFFFFF, seed >> 32)
    r = philox_numpy(key, (token >> 2, position, stream, epoch))[token & 3]
    e = -np.log1p(-(r + 0.5) / 2**32) if r < 2**31 else -np.log((2**32 - 0.5 - r) / 2**32)
    return -np.log(e)


def places_of(seed, position, epoch=0):
    return (
        torch.tensor([[seed & 0xFFFFFFFF, seed >> 32]]),
        torch.tensor([position]),
        torch.tensor([epoch]),
    )


@pytest.mark.parametrize("stream", [TARGET, DRAFT, COIN, RESIDUAL, BONUS])
def test_noise_is_that_of_the_formulas(stream):
    tokens = [0, 1, 2, 3, 4, 97, 4095, 151935]
    seeds, positions, epochs = places_of(SEED, POSITION, 5)
    ours = gumbel_ref(seeds, positions, torch.tensor([tokens]), stream, epochs)
    theirs = [noise_numpy(SEED, POSITION, token, stream, 5) for token in tokens]
    np.testing.assert_allclose(ours[0].numpy(), theirs, rtol=3e-7, atol=3e-7)
    every = gumbel_of_all_ref(seeds, positions, 4097, stream, epochs)
    assert torch.equal(every[0, [0, 1, 2, 3, 4, 97, 4095]], ours[0, :7])


def test_the_bits_are_pinned():
    seeds, positions, _ = places_of(SEED, POSITION)
    bits = gumbel_ref(seeds, positions, torch.arange(8)[None], TARGET).view(torch.int32)
    assert [hex(int(b) & 0xFFFFFFFF) for b in bits[0]] == PINNED


PINNED = [
    "0x3de8c1a3",
    "0xbd6f86a4",
    "0xbf7be202",
    "0xbeab4286",
    "0xbf333c0d",
    "0x3d9d12d4",
    "0xbec2a43a",
    "0x3eec58de",
]


def test_noise_is_accurate_in_both_tails():
    edge = torch.arange(2000)
    draws = torch.cat(
        [edge, 2**31 - 1000 + edge, 2**32 - 1 - edge, torch.randint(0, 2**32, (100_000,))]
    )
    r = draws.double().numpy()
    e = np.where(r < 2**31, -np.log1p(-(r + 0.5) / 2**32), -np.log((2**32 - 0.5 - r) / 2**32))
    truth, ours = -np.log(e), noise_of_bits_ref(draws).numpy()
    ulp = np.maximum(np.spacing(np.abs(truth).astype(np.float32)), 2**-23)
    assert (np.abs(ours - truth) / ulp).max() < 2.5
    assert 22.87 < ours.max() < 22.88
    assert -3.14 < ours.min() < -3.12


@jit
def _estimates_kernel(out_ptr, draws_ptr, BLOCK: tl.constexpr, IS_GPU: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.load(draws_ptr + at).to(tl.uint32)
    tl.store(out_ptr + at, gumbel_estimate(r, IS_GPU))


def test_estimates_are_within_the_error_that_their_readers_allow(device):
    edge = torch.arange(2048)
    # beside the ends: where a series takes over from the logarithm, and where it meets 1 - x
    starts = (0, 2**26 - 1024, 2**31 - 1024, 2**32 - 2048)
    draws = torch.cat([*(edge + start for start in starts), torch.randint(0, 2**32, (1 << 16,))])
    draws = draws.to(device)
    found = torch.full(draws.shape, torch.nan, device=device)
    _estimates_kernel[(len(draws) // 2048,)](found, draws, BLOCK=2048, IS_GPU=draws.is_cuda)
    assert ((found - noise_of_bits_ref(draws)).abs() <= 1e-4).all()


def test_log_is_within_two_units_of_the_last_place():
    x = torch.cat(
        [
            torch.rand(100_000) * 23,
            torch.exp2(torch.linspace(-33, 5, 10_000)),
            1 + torch.randn(1000) * 1e-6,
        ]
    )
    x = x[x > 0]
    truth = x.double().log()
    assert ((log_ref(x) - truth).abs() <= 2 * 2.0**-23 * truth.abs().clamp(min=2**-24)).all()


def test_coins_lie_strictly_between_0_and_1_and_are_fair():
    seeds = torch.stack([torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64)], dim=1)
    coins = uniform_ref(seeds, torch.full((20_000,), 3), COIN)
    assert coins.dtype == torch.float64
    assert 0 < coins.min() < 0.001 < 0.999 < coins.max() < 1
    assert abs(coins.mean() - 0.5) < 0.01
    key, counter = (7, 0), (0, 3, COIN, 0)
    assert coins[7] == (philox_numpy(key, counter)[0] + 0.5) / 2**32


def make_rows(device, T, V):
    """Logits with ties and masked tokens; every other row is greedy."""
    logits = (3 * torch.randn(T, V, device=device)).round(decimals=1)
    logits[:, 1::7] = -torch.inf
    temperatures = torch.rand(T, device=device) + 0.2
    temperatures[::2] = 0
    noise_keys = {
        "temperatures": temperatures,
        "seeds": torch.randint(0, 2**32, (T, 2), device=device),
        "positions": torch.randint(0, 2**20, (T,), device=device),
        "epochs": torch.randint(0, 2**20, (T,), device=device),
    }
    return logits, noise_keys


def reduced(best, ids):
    lowest = torch.where(best == best.amax(0), ids, 1 << 30).amin(0).long()
    return torch.where(best.amax(0) == -torch.inf, -1, lowest)


@pytest.mark.parametrize("T, V", [(1, 5), (3, 1000), (6, 2500)])
@pytest.mark.parametrize("has_ids", [False, True])
def test_the_kernel_chooses_as_the_twin_does(device, T, V, has_ids):
    logits, values = make_rows(device, T, V)
    logits[-1] = -torch.inf  # nothing is left
    ids = torch.randperm(150_000, device=device)[:V].sort().values if has_ids else None
    floor = torch.where(torch.arange(T, device=device) % 3 == 0, 1.5, -torch.inf)
    for stream in (TARGET, RESIDUAL):
        noise_keys = NoiseKeys(stream=stream, token_ids=ids, **values)
        chosen = reduced(*launch_choices(logits, floor, noise_keys)[:2])
        assert torch.equal(chosen, choose_token_ref(logits, floor, noise_keys))
        assert chosen[-1] == -1


def test_the_kernel_has_the_bits_of_the_twin(device):
    V, (seeds, positions, epochs) = 3000, (part.to(device) for part in places_of(SEED, POSITION, 9))
    noise_keys = NoiseKeys(
        temperatures=torch.ones(1, device=device),
        seeds=seeds,
        positions=positions,
        epochs=epochs,
        stream=TARGET,
    )
    noise = gumbel_of_all_ref(seeds, positions, V, TARGET, epochs)
    floor = torch.full((1,), -torch.inf, device=device)
    for column in (0, 1, 2, 3, 1023, 1024, 2999, int(noise.argmax())):
        logits = torch.full((1, V), -torch.inf, device=device)
        logits[0, column] = 0
        best = launch_choices(logits, floor, noise_keys).best
        assert best.amax() == noise[0, column], column


@pytest.mark.parametrize("V", [5, 300, 5000])
def test_floor_of_the_kernel_and_of_the_twin(device, V):
    rows = [
        (0, 0, 1.0),
        (0, 3, 1.0),
        (0, 0, 0.7),
        (0.1, 0, 1.0),
        (0.05, 4, 0.9),
        (0, V + 9, 0.3),
        (0, 1, 0.01),
    ]
    logits, _ = make_rows(device, len(rows) + 1, V)
    limits = Limits(
        temperatures=torch.tensor([0.8] * len(rows) + [0.0], device=device),
        log_min_p=torch.tensor([row[0] for row in [*rows, (0.5,)]], device=device).log(),
        top_k=torch.tensor([row[1] for row in [*rows, (0, 2)]], device=device),
        top_p=torch.tensor([row[2] for row in [*rows, (0, 2, 0.1)]], device=device),
    )
    ours, theirs = launch_support_floor(logits, limits), support_floor_ref(logits, limits)
    scaled = logits / torch.where(limits.temperatures == 0, 1, limits.temperatures)[:, None]
    assert torch.equal(scaled >= ours[:, None], scaled >= theirs[:, None])
    assert ours[0] == ours[-1] == -torch.inf
    for row, (min_p, top_k, top_p) in enumerate(rows):
        expected = support_numpy(
            logits[row].double().cpu().numpy() / float(limits.temperatures[0]), min_p, top_k, top_p
        )
        assert np.array_equal(
            (scaled[row] >= theirs[row]).cpu().numpy() & np.isfinite(logits[row].cpu().numpy()),
            expected,
        )


def support_numpy(x, min_p, top_k, top_p):
    """Which tokens are left, by definition, in float64."""
    kept = np.isfinite(x)
    probs = np.where(kept, np.exp(x - x.max()), 0)
    kept &= probs >= min_p * (1 - 1e-9)
    if top_k:
        kept &= np.array([(x > value).sum() < top_k for value in x])
    if top_p < 1:
        mass = np.array([probs[kept & (x > value)].sum() for value in x])
        kept &= mass < top_p * probs[kept].sum()
    return kept
