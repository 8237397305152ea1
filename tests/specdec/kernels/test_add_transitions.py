"""What a selector adds to scores of candidates: kernel, twin and formula."""

import pytest
import torch

from specdec.kernels.add_transitions import add_transitions
from tests.specdec.kernels.by_kernel import by_kernel


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def transitions(device, k, B, s, dtype):
    """Candidates in the last columns of wider tensors, and the anchors' ids with a stride."""
    V = 50
    scores = torch.randn(k, 2 * B, device=device)[:, B:]
    ids = torch.randint(V, (k, 2 * B), dtype=torch.int32, device=device)[:, B:]
    tokens = torch.randint(V, (B, 3), device=device)[:, 0]
    of_rows, *codebooks = (torch.randn(n, s, device=device).to(dtype) for n in (B, V, V))
    return scores, ids, tokens, of_rows, *codebooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("k, B, s", [(16, 3, 256), (5, 1, 12), (1, 7, 33)])
def test_transitions_are_added_to_scores(device, dtype, k, B, s):
    scores, *others = transitions(device, k, B, s, dtype)
    ids, tokens, projected, before, after = others
    expected = scores.clone()
    for b in range(B):
        context = before[tokens[b]].float() * projected[b].float()
        expected[:, b] += after[ids[:, b].long()].float() @ context
    for by in (by_kernel(add_transitions), add_transitions):
        found = scores.clone()
        by(found, ids.contiguous(), *others[1:])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    wide = torch.full((k, 2 * B), torch.nan, device=device)
    wide[:, B:] = scores
    by_kernel(add_transitions)(wide[:, B:], *others)
    torch.testing.assert_close(wide[:, B:], expected, atol=1e-4, rtol=1e-5)
    assert wide[:, :B].isnan().all()


def test_what_is_no_number_is_never_chosen(device):
    scores, ids, tokens, projected, *codebooks = transitions(device, 4, 2, 8, torch.float32)
    scores, ids = scores.contiguous(), ids.contiguous()
    scores[1, 0], projected[1] = torch.nan, torch.nan
    for by in (by_kernel(add_transitions), add_transitions):
        found = scores.clone()
        by(found, ids, tokens, projected, *codebooks)
        assert (found == -torch.inf).tolist() == [[i == 1, True] for i in range(4)]
    ids[2, 0] = 1 << 30  # of a row with fewer tokens than candidates
    found = scores.clone()
    by_kernel(add_transitions)(found, ids, tokens, projected, *codebooks)
    assert found[2, 0] == scores[2, 0]
