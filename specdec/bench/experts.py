"""One layer of experts, captured from the router to the next norm, against memory speed and torch.

Weights of published sizes are drawn on the device, and rows choose different experts. Layers and
inputs take turns, so that no cache still holds an expert when it is read again. The limit is the
time to read each expert that has a row once. torch: expert_yardstick.py; experts in MXFP4, with
biases and a clamped SwiGLU, are compared with the same sizes in bfloat16 instead.
"""

import math
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
from specdec.kernels.experts.mxfp4 import CODES, SCALES
from specdec.kernels.experts.mxfp4 import ROWS as ROWS_OF_BLOCK
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
    is_packed: bool = False  # as gpt-oss is


class OurLayer(NamedTuple):
    """What `Layer` has, for our kernels."""

    router: Tensor  # [E, D]
    router_bias: Tensor | None
    gate_up: Weight
    down: Weight
    clamp: tuple[float, float] | None
    norm: Tensor  # [D]
    num_chosen: int

    @property
    def expert_bytes(self) -> float:
        """Count the bytes of one expert."""
        tensors = (x for weight in (self.gate_up, self.down) for x in weight if x is not None)
        return sum(x.nbytes for x in tensors) / self.gate_up.num_experts


PUBLISHED = (
    Sizes("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Sizes("Mixtral-8x7B", 8, 2, 4096, 14336),
    Sizes("gpt-oss-20b", 32, 4, 2880, 2880, is_packed=True),
    Sizes("gpt-oss-120b", 128, 4, 2880, 2880, is_packed=True),
)
TINY = (Sizes("tiny", 8, 2, 64, 32), Sizes("tiny MXFP4", 8, 2, 64, 64, is_packed=True))  # for a CPU
CLAMP = (7.0, 1.702)


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
        yield {"model": sizes.model, "rows": T} | _figures(sizes, layers, T, bandwidth)


def draw_layers(sizes: Sizes, device: torch.device) -> list[OurLayer]:
    """Draw as many layers as no cache holds."""
    E, k, D, I, is_packed = sizes[1:]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def drawn(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(std=shape[-1] ** -0.5)

    def weight(N: int, K: int) -> Weight:
        if not is_packed:
            return Weight(drawn(E, N, K))
        return Weight(*_drawn_packed(E, N, K, device), drawn(E, N))

    def layer() -> OurLayer:
        weights = weight(2 * I, D), weight(D, I)
        bias, clamp = (drawn(E), CLAMP) if is_packed else (None, None)
        return OurLayer(drawn(E, D), bias, *weights, clamp, drawn(D).abs(), k)

    first = layer()
    size = E * first.expert_bytes
    count = max(2, math.ceil(CACHES / size)) if device.type == "cuda" else 1
    return [first, *(layer() for _ in range(count - 1))]


def _drawn_packed(E: int, N: int, K: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw the words and scales of MXFP4: numbers about as large as those of `draw_layers`.

    N: whole blocks of rows, of gate and of up
    """
    blocks = -(-K // CODES), N // ROWS_OF_BLOCK
    words = torch.empty(E, *blocks, 128, 4, device=device, dtype=torch.int32)
    words.random_(-(2**31), 2**31)
    scale = round(126 - math.log2(K) / 2)  # codes are about 3 large
    scales = torch.full((E, -(-K // (32 * SCALES)), N), scale * 0x01010101, dtype=torch.int32)
    return words, scales.to(device)


def our_layer(x: Tensor, residual: Tensor, layer: OurLayer) -> tuple[Tensor, Tensor]:
    """Go from the router's input to the next norm."""
    weights = layer.gate_up, layer.down
    parts = experts_mlp(x, *_routing(x, layer)[:2], *weights, layer.clamp)
    return add_rms_norm(parts, residual, layer.norm, EPS)


def _theirs(x: Tensor, residual: Tensor, layer: OurLayer) -> tuple[Tensor, Tensor]:
    weights = layer.router, layer.gate_up.data, layer.down.data
    return grouped_layer(x, residual, Layer(*weights, layer.norm, EPS, layer.num_chosen))


def _routing(x: Tensor, layer: OurLayer) -> Routing:
    return route(router_logits(x, layer.router, layer.router_bias), layer.num_chosen, True)


def _figures(sizes: Sizes, layers: Sequence[OurLayer], T: int, bandwidth: float) -> Row:
    first = layers[0]
    D, I, is_packed = sizes[3:]
    turns = [(layer, *_inputs(T, first.router)) for layer in layers for _ in range(INPUTS)]
    hit = [len(set(_routing(x, layer).ids_TS.flatten().tolist())) for layer, x, _ in turns]
    mean_hit = sum(hit) / len(hit)
    limit = 1e6 * (mean_hit * first.expert_bytes + first.router.nbytes) / bandwidth
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
    if is_packed:
        layers = draw_layers(sizes._replace(is_packed=False), first.router.device)[:2]
        turns = [(layer, x, residual) for layer in layers for _, x, residual in turns[:INPUTS]]
        plain = _time(our_layer, turns)
        return figures | {"plain_us": plain, "over_plain": ours / plain}
    try:
        difference = _difference(*turns[0])
        if difference > TOLERANCE:
            return figures | {"refused": f"differs from grouped_mm by {difference:.3f}"}
        theirs = _time(_theirs, turns)
    except RuntimeError as error:
        return figures | {"grouped_mm": first_line(error)}
    return figures | {"grouped_us": theirs, "over_grouped": ours / theirs}


def _inputs(T: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Draw rows, as a norm leaves them, and the stream that they are added to."""
    x, residual = torch.randn(2, T, like.shape[1], device=like.device).to(like.dtype)
    return x, residual


def _time(
    layer_of: Callable[..., object], turns: Sequence[tuple[OurLayer, Tensor, Tensor]]
) -> float:
    """Time a call in microseconds."""
    calls = [partial(layer_of, x, residual, layer) for layer, x, residual in turns]
    return 1e3 * per_call_ms(turns[0][1].device, calls)


def _difference(layer: OurLayer, x: Tensor, residual: Tensor) -> float:
    """Compare the streams of both; rows whose last expert is a near tie may differ by it."""
    with torch.inference_mode():
        ours, theirs = (each(x, residual, layer)[1].float() for each in (our_layer, _theirs))
    apart = (ours - theirs).abs().amax(1) / theirs.abs().amax()
    return float(apart.quantile(0.9))
