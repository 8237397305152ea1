"""The fastest products of 8-bit numbers that are at hand, for the suites products and exactness.

Nothing of specdec is imported here, so that no yardstick can be the shipped kernel. torch's
_scaled_mm takes a scale for each row of x and of W; with use_fast_accum one accumulator of the
tensor cores sums all of K, which is faster and less exact than what is shipped. DeepGEMM takes the
blocks of 128; it is no dependency, and is timed where it is installed.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

NAMES = ("deep_gemm.fp8_gemm_nt", "deep_gemm.gemm_fp8_fp8_bf16_nt")  # of newer and older versions


def scaled_mm(
    codes_TK: Tensor,
    codes_NK: Tensor,
    scales_T: Tensor,
    scales_N: Tensor,
    dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """Multiply float8_e4m3fn codes with float32 scales to [T, N], by torch's _scaled_mm."""
    return torch._scaled_mm(
        *(codes_TK, codes_NK.t(), scales_T[:, None], scales_N[None]),
        out_dtype=dtype,
        use_fast_accum=use_fast_accum,
    )


def deep_gemm(
    codes_TK: Tensor, codes_NK: Tensor, scales_TG: Tensor, scales_BG: Tensor
) -> Callable[[], Tensor]:
    """Return a call that multiplies to [T, N] in bfloat16, by DeepGEMM.

    Scales are float32 of each 128 of K, of each row of x and of each 128 rows of W. RuntimeError:
    it is not installed.
    """
    product = _of_deep_gemm()
    out_TN = torch.empty(len(codes_TK), len(codes_NK), dtype=torch.bfloat16, device=codes_TK.device)

    def call() -> Tensor:
        product((codes_TK, scales_TG), (codes_NK, scales_BG), out_TN)
        return out_TN

    return call


@cache
def _of_deep_gemm() -> Callable[..., None]:
    for name in NAMES:
        module, _, function = name.partition(".")
        if find_spec(module) is not None and hasattr(import_module(module), function):
            found: Callable[..., None] = getattr(import_module(module), function)
            return found
    raise RuntimeError("DeepGEMM is not installed")
