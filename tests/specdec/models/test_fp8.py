"""Targets in FP8 have the logits and tokens of a float32 reference that knows the formulas alone.

Both round rows to e4m3 in every product. A sum in another order may be on the other side of a
border between two codes, which shows in a few rows; those are left out, and counted.
"""

import dataclasses
from functools import cache

import pytest
import torch

from specdec.kernels.fp8.quantise import row_peaks
from specdec.kernels.tile_shapes import FP8
from specdec.models import layers
from specdec.models.layers import Linear
from specdec.models.products import products_of
from tests import reference
from tests.reference import Reference
from tests.specdec.models.written import written
from tests.weights.fp8 import FORMS, ODD_TARGETS, quantised, save_odd, write_fp8
from weights import load_target
from weights.fp8 import fill

LOGITS = 2e-4  # how far float32 sums in another order may be apart
STEP = 2.0  # and how far logits are, which reach 18, after a code of some row is another
MOST_ROUNDED = 0.2  # of the rows of short texts
SHORT = [[(37 * i + 11 * n + 5) % 96 for i in range(n + 1)] for n in range(6)]
PROMPTS = [[50], [(37 * i + 11) % 96 for i in range(23)], [(29 * i + 5) % 96 for i in range(70)]]
NUM_TOKENS = 8
EACH = [(name, form) for name in ODD_TARGETS for form in FORMS]
QUICK = [("llama", "channel")]  # others show what layers of both forms do
MARKED = [pytest.param(*e, marks=[pytest.mark.slow] * (e not in QUICK)) for e in EACH]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """target(name, form): the reference, and what we load of the same files."""

    @cache
    def build(name, form):
        directory = tmp_path_factory.mktemp("target")
        save_odd(name, directory / "plain")
        write_fp8(directory / "plain", directory / form, form)
        return Reference(directory / form), load_target(directory / form, progress=False)

    return build


def apart(expected, loaded, prompts):
    """How far the logits of each row are apart; where they are not, its token is the best."""
    found = []
    for prompt in prompts:
        text = written(loaded, prompt, NUM_TOKENS)
        logits_NV = expected.forward(prompt + text.tokens[:-1]).logits_TV[len(prompt) - 1 :]
        apart_N = (text.logits_NV - logits_NV).abs().amax(1)
        best_N2, id_N2 = logits_NV.topk(2)
        is_clear_N = best_N2[:, 0] - best_N2[:, 1] > 2 * apart_N.clamp(min=LOGITS)
        assert torch.equal(torch.tensor(text.tokens)[is_clear_N], id_N2[:, 0][is_clear_N])
        found.append(apart_N)
    return torch.cat(found)


def share_apart(*given):
    return float((apart(*given) > LOGITS).float().mean())


@pytest.mark.parametrize("name, form", MARKED)
def test_logits_and_tokens_are_those_of_the_formulas(target, name, form):
    expected, loaded = target(name, form)
    assert share_apart(expected, loaded, SHORT) <= MOST_ROUNDED
    assert float(apart(expected, loaded, PROMPTS[1:]).max()) < STEP


def test_layers_of_both_forms_have_the_logits_of_the_formulas(tmp_path):
    """Experts of one layer are FP8 and of another plain, and so are products of attention."""
    save_odd("qwen3_moe", tmp_path / "plain", num_hidden_layers=3)
    left = r"layers\.2\.mlp|layers\.[01]\.self_attn\.o_proj"
    entries = ["model.layers.2.mlp", "model.layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj"]
    how = {"modules_to_not_convert": entries}
    write_fp8(tmp_path / "plain", tmp_path / "fp8", "block", left, **how)
    loaded = load_target(tmp_path / "fp8", progress=False)
    forms = [kind.experts and kind.experts.form for kind in loaded.config.layers]
    assert forms == ["fp8 block", None, "plain"]
    assert [kind.forms.o_proj for kind in loaded.config.layers] == ["plain", "plain", "fp8 block"]
    assert share_apart(Reference(tmp_path / "fp8"), loaded, SHORT) <= MOST_ROUNDED


def left_as_it_is(x):
    return x, torch.ones(len(x), 1)


def of_the_tensor(x):
    """Take one scale for all rows."""
    scale = x.abs().amax() / 448
    return (x / scale).to(torch.float8_e4m3fn).float(), scale.expand(len(x), 1)


@pytest.mark.parametrize("other", [left_as_it_is, of_the_tensor])
def test_other_codes_of_rows_show_in_the_logits(target, other, monkeypatch):
    expected, loaded = target("llama", "channel")
    monkeypatch.setattr(reference, "quantised", other)
    assert share_apart(expected, loaded, SHORT) > 0.9


@pytest.mark.parametrize(
    "key, form",
    [
        *(("qkv_proj", "channel"), ("down_proj", "channel")),
        *(("o_proj", "block"), ("gate_up_proj", "block")),
    ],
)
def test_a_scale_that_is_lost_shows_in_the_logits(target, key, form):
    expected, loaded = target("llama", form)
    [name] = (e for e in loaded.tensors if f"{key}.weight_scale" in e and "layers.1." in e)
    scales = loaded.tensors[name].clone()
    scales[..., -1] *= 1.5
    broken = dataclasses.replace(loaded, tensors=loaded.tensors | {name: scales})
    assert share_apart(expected, broken, SHORT[:2]) > 0.6


def test_rows_are_quantised_once_where_a_norm_makes_them(target, monkeypatch):
    """Only attention's output and that of gate and up are quantised by themselves."""
    _, loaded = target("llama", "channel")
    asked = []
    real = layers.quantise
    monkeypatch.setattr(layers, "quantise", lambda x, *how: (asked.append(x), real(x, *how))[1])
    written(loaded, PROMPTS[0], 3)
    widths = [x.shape[1] for x in asked]
    assert widths == [192, 320] * (len(asked) // 2)
    assert len(asked) == 2 * 2 * 3  # layers, products, steps


@pytest.mark.parametrize(
    "parts, form, is_shared",
    [
        ((), "fp8 block", True),
        ((256, 64, 64), "fp8 block", True),
        ((256, 96, 96), "fp8 block", False),
        ((256, 64, 64), "fp8 channel", False),
    ],
)
def test_scales_are_shared_where_no_part_begins_inside_a_block(parts, form, is_shared):
    """Each 64 rows have one scale for each 128 columns exactly where a product is told so."""
    rows = parts or (192,)
    linear = Linear(256, sum(rows), form=form, parts=parts)
    pieces = [quantised(torch.randn(N, 256), form.split()[1])[1] for N in rows]
    scales = linear.weight_scale.data
    for scale, place in zip(pieces, scales.split(rows, dim=-1), strict=True):
        fill(place, scale, None)
    assert linear._fp8.is_shared == is_shared
    if form == "fp8 block":
        blocks = scales.unflatten(1, (-1, 64))
        assert bool((blocks == blocks[..., :1]).all()) == is_shared


@pytest.mark.parametrize("form", FORMS)
def test_products_to_be_tuned_have_the_dtype_of_their_form(target, form):
    _, loaded = target("qwen3", form)
    found = {
        (each.kind, each.N, each.K, each.dtype)
        for each in products_of(loaded.config, None, "bfloat16")
    }
    assert found == {
        ("split", 288, 320, FP8),
        ("split", 320, 192, FP8),
        ("gate", 384, 320, FP8),
        ("whole", 96, 320, "bfloat16"),
    }


class Largest:
    """Stands for an exchange: it knows the other rank's rows."""

    def __init__(self, other_TK):
        self.other_TK = other_TK

    def largest(self, own_T):
        return torch.maximum(own_T, row_peaks(self.other_TK))


@pytest.mark.parametrize("form", FORMS)
def test_ranks_with_half_of_the_columns_add_up_to_the_bits_of_all(form):
    torch.manual_seed(0)
    T, N, K = 5, 192, 512
    x_TK = torch.randn(T, K) * torch.tensor([1.0] * 256 + [9.0] * 256)
    codes, scales = quantised(torch.randn(N, K), form)
    place = torch.empty(K // 128, N) if form == "block" else torch.empty(N)
    fill(place, scales, None)
    word = f"fp8 {form}"

    def product(columns, exchange=None):
        linear = Linear(K, N, whole=(N, K), form=word, exchange=exchange)
        linear.weight.data = codes[:, columns].contiguous()
        of_columns = place[columns.start // 128 : columns.stop // 128]
        linear.weight_scale.data = of_columns.contiguous() if form == "block" else place
        return linear.sums(x_TK[:, columns].contiguous()).parts_STN[0].float()

    low, high = slice(0, 256), slice(256, 512)
    parts = product(low, Largest(x_TK[:, high])) + product(high, Largest(x_TK[:, low]))
    assert torch.equal(parts, product(slice(0, 512)))
    if form == "channel":  # a scale of a rank's own columns would be another
        assert not torch.equal(product(low) + product(high), parts)
