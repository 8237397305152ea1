"""Tables of rotary cosines and sines for every position that an engine can reach.

The formulas are those of transformers' modeling_rope_utils: "linear" divides positions, "llama3"
(the Llama 3.1 model card) and "yarn" (arXiv 2309.00071) interpolate low frequencies only.
"""

import math

import torch
from torch import Tensor

from weights.config import LayerKind, RopeConfig


def rope_tables(
    layer: LayerKind, num_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin, each [num_positions, head_dim / 2], in float32 on the CPU; move them."""
    rope, C = layer.rope, layer.head_dim
    exponents = torch.arange(0, C, 2, dtype=torch.int64).float() / C
    frequencies, scale = _RULES[rope.kind](rope, 1.0 / rope.theta**exponents)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


def _default(rope: RopeConfig, frequencies: Tensor) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(rope: RopeConfig, frequencies: Tensor) -> tuple[Tensor, float]:
    return frequencies / rope.factor, 1.0


def _llama3(rope: RopeConfig, frequencies: Tensor) -> tuple[Tensor, float]:
    length = _original_length(rope)
    wavelength = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (length / wavelength - low) / (high - low)
    mixed = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelength > length / low, frequencies / rope.factor, mixed)
    return torch.where(wavelength < length / high, frequencies, scaled), 1.0


def _yarn(rope: RopeConfig, frequencies: Tensor) -> tuple[Tensor, float]:
    pairs = len(frequencies)

    def pair_turning(rotations: float) -> float:
        periods = _original_length(rope) / (rotations * 2 * math.pi)
        return pairs * math.log(periods) / math.log(rope.theta)

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = ((torch.arange(pairs).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp), _yarn_scale(rope)


def _yarn_scale(rope: RopeConfig) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _original_length(rope: RopeConfig) -> int:
    if rope.original_max_position_embeddings is None:
        needed = "original_max_position_embeddings in config.json"
        raise ValueError(f"rope kind {rope.kind!r} needs {needed}")
    return rope.original_max_position_embeddings


_RULES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
