"""Each step of an arrangement is an exact permutation, and leads back."""

import dataclasses

import torch

from tests.weights.pieces import arranged, unfuse
from tests.weights.tiny import LAYER
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
