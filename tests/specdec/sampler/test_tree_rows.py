"""Penalties and bad words along the paths of a tree: each row as in the chain of its path."""

import copy
from dataclasses import replace

import pytest
import torch

from specdec.requests.params import SamplingFlags
from specdec.sampler.process_logits import process_logits
from specdec.sampler.processors import DecidedRows, process
from tests.specdec.kernels.by_kernel import by_kernel
from tests.specdec.sampler.decided import uniform_rows
from tests.specdec.sampler.test_sampling_kernels import DEVICES, V, make_state

PARENTS = [[-1, 0, 0, 1, 3, 1], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 2, 4]]
STATES = [3, 0, 1]
N = 6


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(3)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def path_of(node, parents):
    return [*(path_of(parents[node], parents) if parents[node] >= 0 else ()), node]


def paths():
    return [[path_of(node, parents) for node in range(N)] for parents in PARENTS]


def tree_rows(device, state):
    """Three trees, whose tokens are few, so that they repeat, and the end of a prompt."""
    row_T = torch.tensor([row for row in STATES for _ in range(N)] + [2], device=device)
    depth_T = torch.tensor([len(p) - 1 for each in paths() for p in each] + [0], device=device)
    flat = [[b * N + i for i in p] for b, each in enumerate(paths()) for p in each] + [[3 * N]]
    path_TD = torch.tensor([p + [-1] * (N - len(p)) for p in flat], device=device)
    return DecidedRows(
        state_T=row_T,
        token_T=torch.randint(0, 5, (3 * N + 1,), device=device),
        position_T=state.num_computed_tokens[row_T] + depth_T,
        start_T=path_TD[:, 0].contiguous(),
        longest=N,
        path_TD=path_TD,
    )


FLAGS = [
    SamplingFlags(penalties=True),
    SamplingFlags(bad_words=True),
    SamplingFlags(bias=True, bad_words=True, penalties=True),
]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("apply", [process, by_kernel(process_logits)])
def test_a_row_is_processed_as_the_last_of_its_path(device, apply, flags):
    tree_state = make_state(device)
    before = copy.deepcopy(tree_state)
    rows = tree_rows(device, tree_state)
    logits = torch.randn(3 * N + 1, V, device=device)
    found = logits.clone()
    apply(found, rows, tree_state, flags)
    num_forbidden = 0
    for b, each in enumerate(paths()):
        for path in each:
            here = torch.tensor([b * N + node for node in path], device=device)
            chain = uniform_rows(
                row_B=torch.tensor([STATES[b]], device=device),
                token_BQ=rows.token_T[here][None],
                position_BQ=rows.position_T[here][None],
                num_valid_B=torch.tensor([len(path)], device=device),
            )
            alone = logits[here].clone()
            process(alone, chain, copy.deepcopy(before), flags)
            assert torch.equal(found[here[-1]], alone[-1])
            num_forbidden += int((alone[-1] == -torch.inf).sum())
    assert num_forbidden > 5


@pytest.mark.parametrize("flags", FLAGS)
def test_the_kernel_equals_its_twin_and_writes_the_roots_alone_to_the_history(device, flags):
    ours = make_state(device)
    theirs = copy.deepcopy(ours)
    before = ours.sampling.history.clone()
    rows = tree_rows(device, ours)
    rows = replace(rows, state_T=torch.where(rows.position_T % 7 == 6, -1, rows.state_T))
    logits = torch.randn(3 * N + 1, V + 13, device=device)[:, :V]
    expected = logits.clone()
    by_kernel(process_logits)(logits, rows, ours, flags)
    process(expected, rows, theirs, flags)
    assert torch.equal(logits, expected)
    assert torch.equal(ours.sampling.history[:-1], theirs.sampling.history[:-1])
    is_new = ours.sampling.history[:-1] != before[:-1]
    roots = torch.zeros_like(is_new)
    roots[rows.state_T[rows.start_T.unique()], rows.position_T[rows.start_T.unique()]] = True
    assert not (is_new & ~roots).any()
