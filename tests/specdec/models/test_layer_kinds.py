"""Layers of a target may be of several kinds."""

import dataclasses
import itertools

import pytest
import torch

from specdec.models.build import build_target
from specdec.models.decoder import DecoderModel
from specdec.models.layers import QuantisingNorm
from specdec.models.rope import rope_tables
from tests.specdec.tiny_pair import lively
from tests.weights.tiny import LAYER, tiny_target
from weights import RopeConfig
from weights.config import Forms
from weights.shapes import target_shapes

A, B, C = (dataclasses.replace(LAYER, intermediate_size=width) for width in (16, 24, 48))
F = dataclasses.replace(A, forms=Forms(*["fp8 channel"] * 4))


def mixed(*kinds):
    return dataclasses.replace(tiny_target().config, layers=kinds)


@pytest.mark.parametrize(
    "kinds, taps, kept",
    [
        ((A, A, A, A, A), (), [0, 4]),
        ((A, A, A, A, A), (0, 2, 4), [0, 1, 4]),
        ((A, A, A, A, A), (1, 5), [0, 1, 4]),
        ((A, A, A, B, B, A), (), [0, 3, 5]),
        ((A, B, B, B), (), [0, 1, 3]),  # what B does with all rows too, not with the last one's
        ((A, B, B, B, B), (1, 4), [0, 1, 3, 4]),  # a tap after A, and one after B
        ((A, B), (), [0, 1]),
        ((A,), (), [0]),
    ],
)
def test_a_shortened_model_has_a_layer_of_every_kind(kinds, taps, kept):
    config = mixed(*kinds)
    with torch.device("meta"):
        model = DecoderModel(config, {A.rope: (torch.empty(0), torch.empty(0))}, taps)
    with model.shortened():
        assert [layer.index for layer, _ in model._path] == kept
    assert [layer.index for layer, _ in model._path] == list(range(len(kinds)))


@pytest.mark.parametrize(
    "kinds, taps, kept",
    [
        ((F, F, F, F), (), [0, 3]),
        ((A, F, F, F), (), [0, 1, 3]),
        ((F, F, F, A), (), [0, 2, 3]),
        ((F, F, A, A, A), (), [0, 1, 2, 4]),
        ((F, F, A, A, F), (1,), [0, 1, 2, 3, 4]),
        ((F, F, A, F, F, A, A), (), [0, 1, 2, 4, 5, 6]),
        ((F, F, A, F, A), (), [0, 1, 2, 3, 4]),
        ((A, A, F, F, A, A, A), (6,), [0, 1, 2, 3, 5, 6]),
        ((A, A, F, F, F, A, A), (1, 5), [0, 1, 2, 4, 5, 6]),
    ],
)
def test_no_layer_of_a_shortened_model_gets_codes_that_it_cannot_read(kinds, taps, kept):
    config = mixed(*kinds)
    with torch.device("meta"):
        model = DecoderModel(config, {A.rope: (torch.empty(0), torch.empty(0))}, taps)
    with model.shortened():
        path = model._path
    assert [layer.index for layer, _ in path] == kept
    for (_, norm), (layer, _) in itertools.pairwise(path):
        assert layer.kind == F or not isinstance(norm, QuantisingNorm)
    assert path[-2][1] is path[-1][0].input_layernorm


def test_each_layer_has_the_tables_of_its_own_rope():
    other = dataclasses.replace(A, rope=RopeConfig(theta=500.0))
    config = mixed(A, other, A)
    target = dataclasses.replace(
        tiny_target(), config=config, tensors=lively(target_shapes(config))
    )
    cpu = torch.device("cpu")
    layers = build_target(target, (), 32, cpu).layers
    for layer, kind in zip(layers, config.layers, strict=True):
        for found, expected in zip(layer.self_attn.rope, rope_tables(kind, 32, cpu), strict=True):
            assert torch.equal(found, expected)
    assert layers[0].self_attn.rope is layers[2].self_attn.rope


def test_heads_of_different_shapes_are_refused():
    wide = dataclasses.replace(A, head_dim=32)
    with pytest.raises(AssertionError, match="layers with different heads"):
        _ = mixed(A, wide).heads
