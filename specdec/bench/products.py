"""Products of few rows, ours and cuBLAS's, over the models' own weights, against memory speed.

All layers' weights of one shape take turns, so that no cache still holds a weight when it is read
again. Ours of gate_up_proj includes SwiGLU, cuBLAS's does not. Last come the products of each whole
model: the sum over its weights, experts excepted.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.bench.bench import Bench
from specdec.bench.pair import Pair
from specdec.bench.report import Row
from specdec.bench.timing import CACHES, per_call_ms
from specdec.kernels.experts.router import router_logits
from specdec.kernels.gate_up import gate_up
from specdec.kernels.linear import linear, split_linear

ROWS = (1, 4, 6, 8, 16, 32, 48, 64, 128, 192, 256, 384, 512)


def products(bench: Bench) -> Iterator[Row]:
    """Time every weight's product at few rows, ours and cuBLAS's, as a share of the bandwidth."""
    if bench.pair.target.config.experts is not None:
        bench.skipped.append("products: experts, which the suite experts times")
    totals: dict[tuple[str, int], list[tuple[int, float, float]]] = defaultdict(list)
    for (owner, role), weights in weights_of(bench.pair).items():
        if not bench.has_time(f"products: {owner} {role}"):
            continue
        first, count = weights[0], len(weights)
        N, K, size = *first.shape, first.nbytes
        copies = max(1, -(-CACHES // (size * count))) if first.is_cuda else 1
        tensors = weights + [tensor.clone() for tensor in weights * (copies - 1)]
        for M in ROWS:
            x = torch.randn(M, K, device=first.device).to(first.dtype)
            ours, cublas = (
                1e-3 * per_call_ms(x.device, [partial(product, x, each) for each in tensors])
                for product in _products(role)
            )
            named: Row = {"weight": f"{owner} {role}", "N": N, "K": K, "M": M}
            yield named | _figures(size, ours, cublas, bench.bandwidth)
            totals[owner, M].append((count * size, count * ours, count * cublas))
    for (owner, M), parts in totals.items():
        size, ours, cublas = map(sum, zip(*parts, strict=True))
        figures = _figures(int(size), ours, cublas, bench.bandwidth)
        yield {"weight": f"{owner}: all", "M": M} | figures


def weights_of(pair: Pair) -> dict[tuple[str, str], list[Tensor]]:
    """Group the matrices of both models by owner, "target" or "draft", and by role."""
    found: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    parts = {"target": pair.target.tensors}
    if pair.eagle is not None:
        parts["draft"] = pair.eagle.tensors
    for owner, tensors in parts.items():
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and "embed_tokens" not in name:
                found[owner, name.split(".")[-2]].append(tensor)
    if "lm_head.weight" not in pair.target.tensors:
        found["target", "lm_head"].append(pair.target.tensors["embed_tokens.weight"])
    return found


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
