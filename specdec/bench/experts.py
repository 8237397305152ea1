"""One layer of experts, captured from the router to the next norm, against memory speed and torch.

Weights of published sizes are drawn on the device, and rows choose different experts. Layers and
inputs take turns, so that no cache still holds an expert when it is read again. The limit is the
time to read each expert that has a row once. torch: expert_yardstick.py.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.bench.bench import Bench
from specdec.bench.expert_yardstick import Layer, grouped_layer
from specdec.bench.report import Row
from specdec.bench.timing import CACHES, per_call_ms
from specdec.bench.yardsticks import first_line
from specdec.kernels.experts.mlp import experts_mlp
from specdec.kernels.experts.route import Routing, route
from specdec.kernels.experts.router import router_logits
from specdec.kernels.experts.weight import Weight
from specdec.kernels.norms import add_rms_norm

ROWS = (1, 4, 8, 64, 256, 2048, 8192)
INPUTS = 4  # for each layer
EPS = 1e-6
TOLERANCE = 0.05  # of the largest number: both round to 16 bits several times


class Sizes(NamedTuple):
    """A published model's experts."""

    model: str
    E: int
    k: int
    D: int
    I: int


PUBLISHED = (
    Sizes("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Sizes("Mixtral-8x7B", 8, 2, 4096, 14336),
)
TINY = (Sizes("tiny", 8, 2, 64, 32),)  # for a CPU


def experts(bench: Bench) -> Iterator[Row]:
    """Time a layer of experts, ours and torch's grouped products, as a share of the bandwidth."""
    device = bench.pair.device
    is_gpu = device.type == "cuda"
    for sizes in PUBLISHED if is_gpu else TINY:
        if bench.has_time(f"experts: {sizes.model}"):
            rows = ROWS if is_gpu else ROWS[:3]
            yield from layer_rows(sizes, rows, device, bench.bandwidth)


def layer_rows(
    sizes: Sizes, rows: Sequence[int], device: torch.device, bandwidth: float
) -> Iterator[Row]:
    """Yield a row as soon as it is measured. bandwidth: bytes per second that the device reads."""
    layers = draw_layers(sizes, device)
    for T in rows:
        yield {"model": sizes.model, "rows": T} | _figures(layers, T, bandwidth)


def draw_layers(sizes: Sizes, device: torch.device) -> list[Layer]:
    """Draw as many layers as no cache holds."""
    E, k, D, I = sizes[1:]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def drawn(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(std=shape[-1] ** -0.5)

    size = 3 * E * D * I * dtype.itemsize
    count = max(2, -(-CACHES // size)) if device.type == "cuda" else 1
    return [
        Layer(drawn(E, D), drawn(E, 2 * I, D), drawn(E, D, I), drawn(D).abs(), EPS, k)
        for _ in range(count)
    ]


def our_layer(x: Tensor, residual: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """Go from the router's input to the next norm."""
    weights = Weight(layer.gate_up), Weight(layer.down)
    parts = experts_mlp(x, *_routing(x, layer)[:2], *weights)
    return add_rms_norm(parts, residual, layer.norm, layer.eps)


def _routing(x: Tensor, layer: Layer) -> Routing:
    return route(router_logits(x, layer.router), layer.num_chosen, True)


def _figures(layers: Sequence[Layer], T: int, bandwidth: float) -> Row:
    first = layers[0]
    (E, D, I), dtype = first.down.shape, first.down.dtype
    turns = [(layer, *_inputs(T, first.down)) for layer in layers for _ in range(INPUTS)]
    hit = [len(set(_routing(x, layer).ids_TS.flatten().tolist())) for layer, x, _ in turns]
    mean_hit = sum(hit) / len(hit)
    limit = 1e6 * (mean_hit * 3 * D * I + E * D) * dtype.itemsize / bandwidth
    ours = _time(our_layer, turns)
    router = _time(lambda x, _, layer: _routing(x, layer), turns)
    figures: Row = {
        "hit": mean_hit,
        "limit_us": limit,
        "us": ours,
        "of_bandwidth": limit / ours,
        "router_and_route_us": router,
        "tflops": 6e-6 * T * first.num_chosen * D * I / ours,
    }
    try:
        difference = _difference(*turns[0])
        if difference > TOLERANCE:
            return figures | {"refused": f"differs from grouped_mm by {difference:.3f}"}
        theirs = _time(grouped_layer, turns)
    except RuntimeError as error:
        return figures | {"grouped_mm": first_line(error)}
    return figures | {"grouped_us": theirs, "over_grouped": ours / theirs}


def _inputs(T: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Draw rows, as a norm leaves them, and the stream that they are added to."""
    x, residual = torch.randn(2, T, like.shape[1], device=like.device).to(like.dtype)
    return x, residual


def _time(layer_of: Callable[..., object], turns: Sequence[tuple[Layer, Tensor, Tensor]]) -> float:
    """Time a call in microseconds."""
    calls = [partial(layer_of, x, residual, layer) for layer, x, residual in turns]
    return 1e3 * per_call_ms(turns[0][1].device, calls)


def _difference(layer: Layer, x: Tensor, residual: Tensor) -> float:
    """Compare the streams of both; rows whose last expert is a near tie may differ by it."""
    with torch.inference_mode():
        ours, theirs = (each(x, residual, layer)[1].float() for each in (our_layer, grouped_layer))
    apart = (ours - theirs).abs().amax(1) / theirs.abs().amax()
    return float(apart.quantile(0.9))
