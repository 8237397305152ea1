"""Each element of gpt-oss's stacks has one place, which is the one that is documented."""

import itertools

import pytest
import torch

from tests.weights.mxfp4 import drawn
from weights.arrange import arrange
from weights.turned import BITS, move_of

E, I, D = 2, 3, 5


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


def moved(name, stored):
    """The arranged tensor, as a plan of one layer says it."""
    plan = arrange({f"layers.0.mlp.experts.{name}": tuple(stored.shape)})
    [(whole, shape)] = plan.shapes.items()
    found = plan.moves[f"layers.0.mlp.experts.{name}"].run(stored)
    assert tuple(found.shape) == shape
    return whole.removeprefix("layers.0.mlp.experts."), found


def test_columns_that_alternate_become_halves_of_rows():
    stored = numbered(E, D, 2 * I)
    name, found = moved("gate_up_proj_turned", stored)
    assert name == "gate_up_proj"
    for i in range(I):
        assert torch.equal(found[:, i], stored[:, :, 2 * i])
        assert torch.equal(found[:, I + i], stored[:, :, 2 * i + 1])


def test_biases_that_alternate_become_halves():
    name, found = moved("gate_up_proj_bias", torch.tensor([[0, 3, 1, 4, 2, 5]]))
    assert name == "gate_up_proj_bias"
    assert found.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_columns_become_rows():
    stored = numbered(E, I, D)
    name, found = moved("down_proj_turned", stored)
    assert name == "down_proj"
    assert torch.equal(found.transpose(1, 2), stored)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_each_code_and_each_scale_lies_at_its_place(name, num_blocks):
    torch.manual_seed(0)
    N = 140  # 70 of a part are two blocks of 64
    blocks, scales = drawn(E, N, 32 * num_blocks)
    whole, words = moved(f"{name}_blocks", blocks)
    whole_of_scales, scale_words = moved(f"{name}_scales", scales)
    assert (whole, whole_of_scales) == (name, f"{name}_scales")
    assert words.dtype == scale_words.dtype == torch.int32
    codes = torch.stack([blocks & 15, blocks >> 4], -1).view(E, N, -1).tolist()
    words, scale_words, scales = words.tolist(), scale_words.tolist(), scales.tolist()
    for e, n in itertools.product(range(E), (0, 1, 2, 9, 63, 64, 77, 126, 127, 128, 139)):
        part, row = (n % 2, n // 2) if name == "gate_up_proj" else (0, n)
        R, rest = divmod(row, 64)
        R = 2 * R + part if name == "gate_up_proj" else R
        w, rest = divmod(rest, 16)
        a, i = divmod(rest, 8)
        for column, code in enumerate(codes[e][n]):
            g, rest = divmod(column, 64)
            c, rest = divmod(rest, 32)
            j, rest = divmod(rest, 16)
            h, rest = divmod(rest, 8)
            q, l = divmod(rest, 2)
            word = words[e][g][R][32 * w + 4 * i + q][2 * a + c]
            bits = [word >> (bit + 16 * l) % 32 & 1 for bit in BITS[2 * j + h]]
            assert sum(bit << b for b, bit in enumerate(bits)) == code
        for block, scale in enumerate(scales[e][n]):
            word = scale_words[e][block // 4][part * N // 2 + row]
            assert word >> 8 * (block % 4) & 255 == scale


def test_what_is_missing_in_a_row_is_zeros_with_scales_of_one():
    blocks, scales = drawn(1, 2, 32)
    _, words = moved("down_proj_blocks", blocks)
    _, scale_words = moved("down_proj_scales", scales)
    assert (words.view(128, 2, 2)[..., 1] == 0).all(), "columns 32 to 63"
    assert (words.view(128, 2, 2)[8:] == 0).all(), "rows from 2 on"
    assert (words.view(128, 2, 2)[:8, 1] == 0).all(), "rows 8 and 9"
    assert (words.view(128, 2, 2)[:8, 0, 0] != 0).all()
    assert (scale_words >> 8 == 0x7F7F7F).all()


def test_some_experts_are_moved_as_all_are():
    blocks, _ = drawn(5, 4, 64)
    _, words = moved("gate_up_proj_blocks", blocks)
    move = move_of("experts.gate_up_proj_blocks")
    assert torch.equal(torch.cat([move.run(some) for some in blocks.split(2)]), words)


def test_nothing_else_has_a_move():
    plan = arrange({"layers.0.mlp.gate_up_proj.bias": (4,), "layers.0.mlp.experts.down_proj": (4,)})
    assert plan.moves == plan.dtypes == {}
