"""The floor of the kernels is that of the twin, whichever way their search takes."""

import pytest
import torch

from specdec.kernels import jit, tl
from specdec.kernels import support_floor as floor
from specdec.kernels.support_floor import Limits, launch_support_floor, support_floor_ref
from specdec.kernels.support_floor.ranks import launch_floor_of_ranks
from specdec.kernels.support_floor.units import MASS, mass_of
from tests.specdec.fake_ranks import FakeRanks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = {
    "peaked": lambda shape: 4 * torch.randn(shape),
    "flat": lambda shape: 0.3 * torch.randn(shape),
    "equals": lambda shape: torch.randint(-3, 3, shape).float(),
    "far below zero": lambda shape: torch.randn(shape) - 500,
    "one above all": lambda shape: torch.randn(shape) + 100 * (torch.arange(shape[1]) == 3),
    "many equals below the top": lambda shape: torch.where(
        torch.arange(shape[1]) < 500, 3 * torch.randn(shape), -4.0
    ),
    "mostly masked": lambda shape: torch.randn(shape).masked_fill(
        torch.rand(shape) < 0.99, -torch.inf
    ),
}
FEW, MANY = ("equals",), ("peaked", "many equals below the top", "mostly masked")
LIMITS = [
    *((0, k, 1.0) for k in (1, 3, 40, 700, 10_000)),
    *((0, 0, p) for p in (1e-6, 0.3, 0.9, 0.999, 0.9999999)),
    (0.02, 0, 1.0),
    (1.0, 0, 1.0),
    (1e-9, 0, 0.99),
    *((0.001, 50, p) for p in (0.5, 0.95, 0.99999)),
    (0, 900, 0.7),
    (0, 0, 1.0),
]


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def limits_of(device, temperature):
    min_p, top_k, top_p = (torch.tensor(column) for column in zip(*LIMITS, strict=True))
    temperatures = torch.full((len(LIMITS),), temperature)
    values = (temperatures, min_p.log(), top_k, top_p)
    names = ("temperatures", "log_min_p", "top_k", "top_p")
    return Limits(**{name: value.to(device) for name, value in zip(names, values, strict=True)})


def borders(logits, limits, floors):
    """How many tokens are kept, and how many by a floor one part in a million lower or higher."""
    scaled = logits / limits.temperatures[:, None]
    return [
        (scaled >= (floors + d * 1e-6 * (1 + floors.abs().nan_to_num(0)))[:, None]).sum(1)
        for d in (0, -1, 1)
    ]


# room for all that is gathered, for few, for none
@pytest.mark.parametrize(
    "kind, num_keys",
    [
        *((kind, 8192) for kind in MANY),
        *(pytest.param(kind, 8192, marks=pytest.mark.slow) for kind in KINDS if kind not in MANY),
        *((kind, 1) for kind in FEW),
        *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in KINDS if kind not in FEW),
        *(pytest.param(kind, 64, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_the_kernels_keep_what_the_twin_keeps(device, kind, num_keys):
    logits, limits = KINDS[kind]((len(LIMITS), 5000)).to(device), limits_of(device, 0.7)
    assert_same_support(logits, limits, launch_support_floor(logits, limits, num_keys=num_keys))


def assert_same_support(logits, limits, floors):
    """The rows keep what the twin keeps."""
    kept = borders(logits, limits, floors)[0]
    expected, most, least = borders(logits, limits, support_floor_ref(logits, limits))
    # the hardware's exp moves a mass by some parts in ten million: top-p may end one token further
    slack = torch.where(limits.top_p < 1, 1 + most - least, 0)
    assert ((kept - expected).abs() <= slack).all()
    assert (kept == expected).float().mean() > 0.9


@pytest.mark.parametrize("num_keys", [pytest.param(64, marks=pytest.mark.slow), 1])
def test_the_way_of_the_search_and_the_neighbours_do_not_move_the_floor(device, num_keys):
    logits, limits = KINDS["peaked"]((len(LIMITS), 3000)).to(device), limits_of(device, 1.3)
    usual = launch_support_floor(logits, limits)
    assert torch.equal(launch_support_floor(logits, limits, num_keys=num_keys), usual)
    few = Limits(*(each[5:16] for each in limits))
    assert torch.equal(launch_support_floor(logits[5:16], few), usual[5:16])


@pytest.mark.parametrize(
    "tokens",
    [
        slice(2048, None),
        pytest.param(slice(1500, 1600), marks=pytest.mark.slow),
        pytest.param(slice(4999, None), marks=pytest.mark.slow),
        slice(0, 0),
    ],
)
def test_limits_hold_where_whole_tiles_are_masked(device, tokens):
    logits, limits = torch.full((len(LIMITS), 5000), -torch.inf), limits_of(device, 0.7)
    logits[:, tokens] = 3 * torch.randn(logits[:, tokens].shape)
    logits = logits.to(device)
    assert_same_support(logits, limits, launch_support_floor(logits, limits))


@pytest.mark.parametrize("far", [30.9, 31.1, 31.3, 31.6, 31.9, 32.1])
def test_every_tile_counts_what_lies_within_the_last_steps(device, far):
    logits = torch.full((3, 5000), -torch.inf, device=device)
    logits[:, [5, 6, 7, 3000]] = -torch.tensor([0.0, 30.8, 31.3, far], device=device)
    off = torch.full((3,), -torch.inf, device=device)
    top_k = torch.tensor([2, 3, 4], device=device)
    limits = Limits(
        temperatures=torch.ones_like(off), log_min_p=off, top_k=top_k, top_p=torch.ones_like(off)
    )
    assert torch.equal(launch_support_floor(logits, limits), support_floor_ref(logits, limits))


class WithoutRow:
    """The search with a row of NaN in place of the logits."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **options):
            tensors = [
                torch.full_like(x, torch.nan)
                if isinstance(x, torch.Tensor) and x.ndim == 2 and x.shape[1] == 5000
                else x
                for x in args
            ]
            return self.kernel[grid](*tensors, **options)

        return launch


@pytest.mark.parametrize(
    "below",
    [0.5, *(pytest.param(below, marks=pytest.mark.slow) for below in (9.0, 14.0, 17.0, 25.0))],
)
def test_limits_are_found_without_reading_the_row_again_even_beside_many_equals(
    device, monkeypatch, below
):
    logits, limits = 2.5 * torch.randn(len(LIMITS), 5000), limits_of(device, 1.0)
    logits[:, 500:] = logits.amax(dim=1, keepdim=True) - below
    usual = launch_support_floor(logits.to(device), limits)
    monkeypatch.setattr(floor, "search_kernel", WithoutRow(floor.search_kernel))
    found = launch_support_floor(logits.to(device), limits) == usual
    # as many tokens as there are, or all but a ten-millionth of the mass
    is_reread = (limits.top_k >= 5000) | (limits.top_p == torch.tensor(0.9999999))
    assert (found.cpu() | is_reread.cpu()).all(), [
        LIMITS[i] for i in (~found).nonzero()[:, 0].tolist()
    ]


@jit
def masses_kernel(masses_ptr, x_ptr, n, BLOCK: tl.constexpr):
    """What the search takes for the masses of values below a top of 0."""
    i = tl.arange(0, BLOCK)
    tl.store(masses_ptr + i, mass_of(tl.load(x_ptr + i, mask=i < n, other=0.0), 0.0), mask=i < n)


def kernels_masses(x):
    masses = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    masses_kernel[(1,)](masses, x, len(x), BLOCK=4096)
    return masses


def twins_masses(x):
    return (x.double().exp() * MASS).long()


def halves(masses_of, device):
    """Values below a top of 0 whose masses are together the top's own, to the bit."""
    found, rest = [-0.5], MASS - int(masses_of(torch.tensor([-0.5], device=device)))
    while rest:
        # of the float32 numbers around log(rest), the one with the most mass up to the rest
        middle = torch.tensor([rest / MASS], dtype=torch.float64).log().float()
        near = (
            (middle.view(torch.int32) + torch.arange(-2000, 2000))
            .int()
            .view(torch.float32)
            .to(device)
        )
        masses = masses_of(near)
        best = int(torch.where(masses <= rest, masses, 0).argmax())
        found.append(float(near[best]))
        rest -= int(masses[best])
    return torch.tensor(found, device=device)


@pytest.mark.parametrize("floor_of", ["twin", 8192, 1])
def test_a_token_with_exactly_top_p_of_the_mass_above_it_is_out(device, floor_of):
    x = halves(twins_masses if floor_of == "twin" else kernels_masses, device)
    logits = torch.full((2, 5000), -torch.inf, device=device)
    logits[:, 7], logits[:, 100 : 100 + len(x)] = 0, x
    p = torch.tensor(
        [0.5, 0.5 + 2**-24], device=device
    )  # the neighbour above 0.5 keeps one token more
    off = torch.full_like(p, -torch.inf)
    limits = Limits(
        temperatures=torch.ones_like(p), log_min_p=off, top_k=torch.zeros_like(p).long(), top_p=p
    )
    floors = (
        support_floor_ref(logits, limits)
        if floor_of == "twin"
        else launch_support_floor(logits, limits, floor_of)
    )
    assert floors.tolist() == [0.0, -0.5]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_keys", [8192, 64])
def test_ranks_find_the_floor_of_the_whole_row(kind, num_keys):
    """Where some ranks have room for their keys and others have not, too."""
    torch.manual_seed(0)
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    logits, limits = KINDS[kind]((len(LIMITS), 3000)), limits_of("cpu", 0.7)

    def of_rank(rank):
        cut = rank.cut(3000)
        here = logits[:, cut.ids.start : cut.ids.stop].contiguous()
        return launch_floor_of_ranks(here, limits, num_keys, cut)

    whole = launch_support_floor(logits, limits)
    for found in FakeRanks(2).run(of_rank):
        assert torch.equal(found, whole)
