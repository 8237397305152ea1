"""Each step of an arrangement is an exact permutation, and leads back."""

import dataclasses

import pytest
import torch

from tests.weights.pieces import arranged, unfuse
from tests.weights.tiny import LAYER
from weights import ExpertsConfig
from weights.arrange import arrange
from weights.shapes import layer_shapes


def numbered(shapes):
    """Tensors whose elements are all different."""
    first = 0
    pieces = {}
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        pieces[name] = torch.arange(first, first + count).view(shape)
        first += count
    return pieces


def check_both_ways(pieces):
    """Every element has exactly one place, and `pieces` finds all of them again."""
    tensors = arranged(pieces)
    there = torch.cat([tensor.flatten() for tensor in tensors.values()]).sort().values
    assert torch.equal(there, torch.arange(len(there)))
    shapes = {name: tuple(piece.shape) for name, piece in pieces.items()}
    found = arrange(shapes).pieces(tensors)
    assert found.keys() == pieces.keys()
    assert all(torch.equal(found[name], pieces[name]) for name in pieces)
    assert all(piece.is_contiguous() for piece in found.values())  # a GPU is filled by bytes
    return tensors


def test_a_dense_layer_goes_there_and_back():
    layer = dataclasses.replace(LAYER, qkv_bias=True, mlp_bias=True, qk_norm=True)
    pieces = numbered(layer_shapes("layers.0.", layer, 32))
    tensors = check_both_ways(pieces)
    apart = unfuse(layer, tensors)
    assert apart.keys() == pieces.keys()
    assert all(torch.equal(apart[name], pieces[name]) for name in pieces)


def test_the_order_of_names_moves_nothing():
    pieces = numbered(layer_shapes("layers.0.", LAYER, 32))
    usual, turned = arranged(pieces), arranged(dict(reversed(pieces.items())))
    assert all(torch.equal(usual[name], turned[name]) for name in usual)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_a_layer_of_experts_goes_there_and_back(is_stacked):
    E, I, D = 12, 5, 32
    experts = ExpertsConfig(num=E, per_token=3, width=I, renormalise=True, is_stacked=is_stacked)
    layer = dataclasses.replace(LAYER, intermediate_size=0, experts=experts)
    pieces = numbered(layer_shapes("layers.0.", layer, D))
    tensors = check_both_ways(dict(reversed(pieces.items())))
    gate_up, down = (tensors[f"layers.0.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    assert (gate_up.shape, down.shape) == ((E, 2 * I, D), (E, D, I))
    if is_stacked:
        return
    for e in (0, 2, 11):  # 11 comes before 2 where names are sorted
        prefix = f"layers.0.mlp.experts.{e}"
        assert torch.equal(gate_up[e, :I], pieces[f"{prefix}.gate_proj.weight"])
        assert torch.equal(gate_up[e, I:], pieces[f"{prefix}.up_proj.weight"])
        assert torch.equal(down[e], pieces[f"{prefix}.down_proj.weight"])
