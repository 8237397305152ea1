"""Kernel == twin, and a row's sum is the same beside any number of others."""

import pytest
import torch

from specdec.kernels.log_sum_exp import BLOCK, log_sum_exp, log_sum_exp_ref
from tests.specdec.kernels.by_kernel import by_kernel


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return request.param


@pytest.mark.parametrize("V", [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK - 7])
def test_the_kernel_is_its_twin(device, V):
    x_TV = torch.randn(3, V, device=device) * 20
    x_TV[0, V // 2 + 1 :] = -torch.inf
    torch.testing.assert_close(
        by_kernel(log_sum_exp)(x_TV), log_sum_exp_ref(x_TV), rtol=1e-6, atol=0
    )


@pytest.mark.gpu
@pytest.mark.parametrize("V", [5, 1000, 4096, 32000, 128256])
def test_a_row_has_the_same_bits_beside_any_number_of_others(V):
    torch.manual_seed(0)
    x_TV = torch.randn(130, V, device="cuda") * 8
    expected = torch.cat([by_kernel(log_sum_exp)(x_TV[i : i + 1]) for i in range(130)])
    for T in (*range(2, 35), 64, 130):
        assert torch.equal(by_kernel(log_sum_exp)(x_TV[:T]), expected[:T]), T
