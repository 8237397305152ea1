"""Products of few rows, ours and cuBLAS's, over the models' own weights, against memory speed.

On a GPU prompts' products follow, except those of heads, which have few rows: at so many rows the
sum of a model has no head.

Of 8-bit weights the other one is torch's _scaled_mm with a scale a row and fast accumulation, which
ours does without; the column slow_accum_us is without it, deep_gemm_us by DeepGEMM where that is
installed, for blocks. x is quantised before.

All layers' weights of one shape take turns, so that no cache still holds a weight when it is read
again. Ours of gate_up_proj includes SwiGLU, cuBLAS's does not. Last come the products of each whole
model: the sum over its weights, experts excepted.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.bench.bench import Bench
from specdec.bench.fp8_yardstick import deep_gemm, scaled_mm
from specdec.bench.pair import TABLES, Pair
from specdec.bench.report import Row
from specdec.bench.timing import CACHES, per_call_ms
from specdec.bench.yardsticks import first_line
from specdec.kernels.experts.router import router_logits
from specdec.kernels.fp8.products import fp8_gate_up, fp8_split_linear
from specdec.kernels.fp8.quantise import quantise
from specdec.kernels.fp8.weight import E4M3, GROUP, Fp8, Fp8Rows
from specdec.kernels.gate_up import gate_up
from specdec.kernels.linear import linear, split_linear
from specdec.models.layers import SHARED_ROWS

Matrix = Tensor | Fp8
SCALE = "_scale"  # after the name of an 8-bit weight
ROWS = (1, 4, 6, 8, 16, 32, 48, 64, 128, 192, 256, 384, 512)
PROMPTS = (2048, 8192)


def products(bench: Bench) -> Iterator[Row]:
    """Time every weight's product, ours and cuBLAS's, as a share of the bandwidth."""
    if bench.pair.target.config.experts is not None:
        bench.skipped.append("products: experts, which the suite experts times")
    totals: dict[tuple[str, int], list[tuple[int, float, float]]] = defaultdict(list)
    for (owner, role), weights in weights_of(bench.pair).items():
        if not bench.has_time(f"products: {owner} {role}"):
            continue
        first, count = _matrix(weights[0]), len(weights)
        N, K, size = *first.shape, _bytes_of(weights[0])
        copies = max(1, -(-CACHES // (size * count))) if first.is_cuda else 1
        every = weights + [_clone(each) for each in weights * (copies - 1)]
        has_prompts = first.is_cuda and role != "lm_head"
        for M in ROWS + PROMPTS * has_prompts:
            wide = torch.bfloat16 if first.is_cuda else torch.float32
            x = torch.randn(M, K, device=first.device).to(
                wide if first.dtype == E4M3 else first.dtype
            )
            named: Row = {"weight": f"{owner} {role}", "N": N, "K": K, "M": M}
            if isinstance(weights[0], Fp8):
                ours, cublas, others = _of_fp8(role, x, every)
                named |= others
            else:
                ours, cublas = (_seconds(product, x, every) for product in _products(role))
            yield named | _figures(size, ours, cublas, bench.bandwidth)
            totals[owner, M].append((count * size, count * ours, count * cublas))
    for (owner, M), parts in totals.items():
        size, ours, cublas = map(sum, zip(*parts, strict=True))
        figures = _figures(int(size), ours, cublas, bench.bandwidth)
        yield {"weight": f"{owner}: all", "M": M} | figures


def weights_of(pair: Pair) -> dict[tuple[str, str], list[Matrix]]:
    """Group the matrices of both models by owner, "target" or "draft", and by role."""
    found: dict[tuple[str, str], list[Matrix]] = defaultdict(list)
    parts = {"target": pair.target.tensors}
    if pair.eagle is not None:
        parts["draft"] = pair.eagle.tensors
    for owner, tensors in parts.items():
        for name, tensor in tensors.items():
            if tensor.ndim != 2 or name in TABLES or name.endswith(SCALE):
                continue
            matrix = _fp8(tensor, tensors[name + SCALE]) if tensor.dtype == E4M3 else tensor
            found[owner, name.split(".")[-2]].append(matrix)
    if "lm_head.weight" not in pair.target.tensors:
        found["target", "lm_head"].append(pair.target.tensors["embed_tokens.weight"])
    return found


def _fp8(codes_NK: Tensor, scales: Tensor) -> Fp8:
    """Make the weight that the module of these tensors multiplies by, which knows its parts."""
    is_shared = False
    if scales.dim() == 2 and scales.shape[1] % SHARED_ROWS == 0:
        blocks = scales.view(len(scales), -1, SHARED_ROWS)
        is_shared = bool((blocks == blocks[..., :1]).all())
    return Fp8(codes_NK, scales, is_shared)


def _matrix(weight: Matrix) -> Tensor:
    return weight.codes_NK if isinstance(weight, Fp8) else weight


def _bytes_of(weight: Matrix) -> int:
    return sum(each.nbytes for each in weight[:2]) if isinstance(weight, Fp8) else weight.nbytes


def _clone(weight: Matrix) -> Matrix:
    if isinstance(weight, Fp8):
        return weight._replace(codes_NK=weight.codes_NK.clone(), scales=weight.scales.clone())
    return weight.clone()


def _seconds(product: Callable[..., object], x: object, weights: Sequence[Matrix]) -> float:
    device = _matrix(weights[0]).device
    return 1e-3 * per_call_ms(device, [partial(product, x, each) for each in weights])


def _of_fp8(role: str, x_TK: Tensor, weights: Sequence[Matrix]) -> tuple[float, float, Row]:
    """Time ours, _scaled_mm's fast accumulation, and the others: seconds, and columns of a row."""
    first = weights[0]
    assert isinstance(first, Fp8)
    x = quantise(x_TK, first.is_block)
    dtype = x_TK.dtype
    is_gated = role == "gate_up_proj"
    product: Callable[..., object] = fp8_gate_up if is_gated else fp8_split_linear
    ours = _seconds(lambda x, weight: product(x, weight, None, dtype), x, weights)
    others: Row = {"form": "fp8 block" if first.is_block else "fp8 channel"}
    fast, slow = (
        _seconds(partial(_scaled, dtype=dtype, use_fast_accum=is_fast), x, weights)
        for is_fast in (True, False)
    )
    others["slow_accum_us"] = 1e6 * slow
    if first.is_block and x_TK.is_cuda:
        try:
            calls = [_deep_gemm(x, each) for each in weights if isinstance(each, Fp8)]
            others["deep_gemm_us"] = 1e3 * per_call_ms(x_TK.device, calls)
        except RuntimeError as error:
            others["deep_gemm"] = first_line(error)
    return ours, fast, others


def _scaled(x: Fp8Rows, weight: Fp8, dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
    """Multiply with a scale a row, of blocks the first."""
    of_x, of_w = (each.scales[0] if each.is_block else each.scales for each in (x, weight))
    codes = x.codes_TK, weight.codes_NK
    return scaled_mm(*codes, of_x[: len(codes[0])], of_w, dtype, use_fast_accum)


def _deep_gemm(x: Fp8Rows, weight: Fp8) -> Callable[[], Tensor]:
    of_x = x.scales.t()[: len(x.codes_TK)].contiguous()
    of_w = weight.scales[:, ::GROUP].t().contiguous()
    return deep_gemm(x.codes_TK, weight.codes_NK, of_x, of_w)


def _products(role: str) -> tuple[Callable[..., object], Callable[..., object]]:
    """Choose ours, as its reader needs it, and cuBLAS's."""
    if role == "lm_head":
        return partial(linear, out_dtype=torch.float32), _in_float32
    ours: dict[str, Callable[..., object]] = {
        **{"gate_up_proj": gate_up, "fc": linear},
        "gate": router_logits,
    }
    return ours.get(role, split_linear), F.linear


def _in_float32(x: Tensor, w: Tensor) -> Tensor:
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, w.t(), out_dtype=torch.float32)
    return F.linear(x, w).float()


def _figures(size: int, ours: float, cublas: float, bandwidth: float) -> Row:
    """Compute a row's figures. size: bytes of weights; ours, cublas: seconds."""
    return {
        "us": 1e6 * ours,
        "cublas_us": 1e6 * cublas,
        "over_cublas": ours / cublas,
        "gb_per_s": size / ours / 1e9,
        "cublas_gb_per_s": size / cublas / 1e9,
        "of_bandwidth": size / ours / bandwidth,
        "cublas_of_bandwidth": size / cublas / bandwidth,
    }
