"""FP8 weights, from files of both published forms to what kernels read."""

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.weights.fp8 import (
    FORMS,
    ODD_TARGETS,
    numbers_of,
    quantised,
    save_odd,
    write_fp8,
)
from tests.weights.gpt_oss import rewritten
from weights import CheckpointError, Shard, load_target
from weights.config import Forms

NAMES = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Directories of plain targets, by model type."""
    return {name: save_odd(name, tmp_path_factory.mktemp("plain")) for name in ODD_TARGETS}


def dequantised(tensors, name):
    """Multiply what kernels read: codes by scales of their rows [N] or [K / 128, N]."""
    codes = tensors[name].float()
    scales = tensors[f"{name}_scale" if name.endswith("weight") else f"{name}_scales"]
    if scales.dim() == codes.dim() - 1:
        return codes * scales[..., None]
    wide = scales.transpose(-1, -2).repeat_interleave(128, -1)
    return codes * wide[..., : codes.shape[-1]]


def expected_of(name, numbers):
    """Give a product's numbers from those of its parts in files."""
    whole = next((whole for whole in NAMES if whole in name), None)
    parts = NAMES.get(whole, (whole,))
    if ".experts." not in name:
        return torch.cat(
            [numbers[f"model.{name.replace(str(whole), str(part))}"] for part in parts]
        )
    layer, last = name.rsplit(".", 1)
    each = [[f"model.{layer}.{e}.{part or last}.weight" for part in parts] for e in range(6)]
    return torch.stack([torch.cat([numbers[part] for part in expert]) for expert in each])


@pytest.mark.parametrize("name", ODD_TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_products_are_the_numbers_that_files_mean(plain, tmp_path, name, form):
    numbers = write_fp8(plain[name], tmp_path, form)
    loaded = load_target(tmp_path, progress=False)
    codes = [key for key, x in loaded.tensors.items() if x.dtype == torch.float8_e4m3fn]
    assert len(codes) == 8
    for key in codes:
        assert torch.equal(dequantised(loaded.tensors, key), expected_of(key, numbers)), key
    scales = {key: x for key, x in loaded.tensors.items() if "_scale" in key}
    assert {x.dtype for x in scales.values()} == {torch.float32}
    assert all(x.is_contiguous() for x in scales.values())
    assert not [note for note in loaded.report.notes if "cast" in note]


@pytest.mark.parametrize("shape", [(192, 320), (128, 256), (24, 40)])
def test_numbers_are_those_of_transformers(shape):
    torch.manual_seed(0)
    padded = [-(-size // 128) * 128 for size in shape]
    for form in FORMS:
        codes, scales = quantised(torch.randn(shape), form)
        wide = torch.zeros(padded).to(codes.dtype) if form == "block" else codes
        wide[: shape[0], : shape[1]] = codes
        # blocks of a whole size are all that it takes
        theirs = Fp8Dequantize(None)._dequantize_one(wide, scales, torch.float32)
        assert torch.equal(theirs[: shape[0], : shape[1]], numbers_of(codes, scales)), form


@pytest.mark.parametrize("form", FORMS)
def test_scales_may_be_flat_and_have_either_name(plain, tmp_path, form):
    expected = write_fp8(plain["llama"], tmp_path / "a", form)
    write_fp8(plain["llama"], tmp_path / "b", form, is_flat=form == "channel")

    def rename(tensors):
        for name in [name for name in tensors if "weight_scale" in name]:
            other = name.removesuffix("_inv") if name.endswith("_inv") else f"{name}_inv"
            tensors[other] = tensors.pop(name)

    loaded = load_target(rewritten(tmp_path / "b", tmp_path / "c", rename), progress=False)
    key = "layers.1.self_attn.qkv_proj.weight"
    assert torch.equal(dequantised(loaded.tensors, key), expected_of(key, expected))


def test_scales_of_blocks_are_not_flat(tmp_path):
    """Not even where one block has all columns."""
    sizes = {"hidden_size": 96, "intermediate_size": 96, "head_dim": 12, "num_hidden_layers": 1}
    save_odd("llama", tmp_path / "plain", **sizes)
    write_fp8(tmp_path / "plain", tmp_path / "fp8", "block", is_flat=True)
    with pytest.raises(CheckpointError) as error:
        load_target(tmp_path / "fp8", progress=False)
    assert len(error.value.problems) == 7
    assert all(line.endswith(" is [1], [1, 1] is needed") for line in error.value.problems)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_have_their_rows_and_columns_of_scales(plain, tmp_path, form):
    """Rows of a rank may begin inside a block; the columns of this model are cut at its borders."""
    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 8}
    sizes |= {"head_dim": 32, "num_key_value_heads": 4}
    source = save_odd("llama", tmp_path / "plain", **sizes)
    write_fp8(source, tmp_path / "out", form)
    whole = load_target(tmp_path / "out", progress=False).tensors
    for rank in range(2):
        shard = Shard(rank, 2)
        mine = load_target(tmp_path / "out", shard=shard, progress=False).tensors
        for i in range(2):
            qkv, gate_up = (f"layers.{i}.{x}_proj.weight" for x in ("self_attn.qkv", "mlp.gate_up"))
            q, k, v = dequantised(whole, qkv).split([256, 128, 128])
            parts = [x.chunk(2)[rank] for x in (q, k, v)]
            assert torch.equal(dequantised(mine, qkv), torch.cat(parts))
            gate, up = dequantised(whole, gate_up).chunk(2)
            parts = [x.chunk(2)[rank] for x in (gate, up)]
            assert torch.equal(dequantised(mine, gate_up), torch.cat(parts))
            for name in (f"layers.{i}.self_attn.o_proj.weight", f"layers.{i}.mlp.down_proj.weight"):
                part = dequantised(whole, name).chunk(2, 1)[rank]
                assert torch.equal(dequantised(mine, name), part)


def test_experts_of_a_rank_have_their_scales(plain, tmp_path):
    write_fp8(
        plain["qwen3_moe"],
        tmp_path,
        "block",
        plain="self_attn|layers.1",
        **{"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.1"]},
    )  # of the other products borders lie inside blocks
    whole = load_target(tmp_path, progress=False).tensors
    mine = load_target(tmp_path, shard=Shard(1, 2), progress=False).tensors
    for name in ("gate_up_proj", "down_proj"):
        name = f"layers.0.mlp.experts.{name}"
        assert torch.equal(dequantised(mine, name), dequantised(whole, name)[3:])


@pytest.mark.parametrize("form", FORMS)
def test_layers_may_have_different_forms(plain, tmp_path, form):
    key = {"channel": "ignore", "block": "modules_to_not_convert"}[form]
    entries = {
        "channel": ["re:.*layers\\.1\\.mlp\\..*", "model.layers.0.self_attn.o_proj", "lm_head"],
        "block": ["model.layers.1.mlp", "model.layers.0.self_attn.o_proj"],
    }[form]
    left = r"layers\.1\.mlp|layers\.0\.self_attn\.o_proj"
    numbers = write_fp8(plain["llama"], tmp_path, form, left, **{key: entries})
    loaded = load_target(tmp_path, progress=False)
    word = f"fp8 {form}"
    assert [kind.forms for kind in loaded.config.layers] == [
        Forms(word, "plain", word, word),
        Forms(word, word, "plain", "plain"),
    ]
    original = load_target(plain["llama"], progress=False).tensors
    for name in ("layers.0.self_attn.o_proj.weight", "layers.1.mlp.gate_up_proj.weight"):
        assert torch.equal(loaded.tensors[name], original[name])
    name = "layers.1.self_attn.qkv_proj.weight"
    assert torch.equal(dequantised(loaded.tensors, name), expected_of(name, numbers))
    rows = {row.field: row.value for row in loaded.report.fields}
    assert rows["qkv_proj"] == word
    assert rows["o_proj"] == f"plain in 1 of 2 layers, {word} in 1 of 2 layers"


def problems_of(directory):
    with pytest.raises(CheckpointError) as error:
        load_target(directory, progress=False)
    return [line.split(": ", 1)[1] for line in error.value.problems]


ATTENTION = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    "form, name, value",
    [
        ("channel", "q_proj.weight_scale", 0.0),
        ("channel", "o_proj.weight_scale", -1.0),
        ("block", "k_proj.weight_scale_inv", float("nan")),
        ("block", "v_proj.weight_scale_inv", float("inf")),
    ],
)
def test_a_scale_that_is_no_positive_number_is_a_line_with_its_tensor(
    plain, tmp_path, form, name, value
):
    write_fp8(plain["llama"], tmp_path / "a", form)

    def spoil(tensors):
        tensors[f"{ATTENTION}.{name}"][0, 0] = value

    found = problems_of(rewritten(tmp_path / "a", tmp_path / "b", spoil))
    assert found == [
        f"{ATTENTION}.{name} has 1 scales that are no positive numbers, such as {value}"
    ]


def test_what_is_wrong_with_tensors_comes_in_one_error(plain, tmp_path):
    write_fp8(plain["llama"], tmp_path / "a", "block")

    def spoil(tensors):
        tensors[f"{ATTENTION}.q_proj.weight_scale_inv"] = torch.ones(3, 2)
        tensors[f"{ATTENTION}.o_proj.weight_scale_inv"] = torch.ones(2, 2).to(torch.float8_e5m2)
        tensors[f"{ATTENTION}.k_proj.weight"] = torch.ones(48, 192)
        tensors[f"{ATTENTION}.v_proj.weight"] = torch.ones(48, 192).to(torch.float8_e5m2)
        tensors[f"{ATTENTION}.k_scale"] = torch.ones(1)
        tensors[f"{ATTENTION}.v_scale"] = torch.ones(1)
        tensors["model.layers.0.mlp.up_proj.input_scale"] = torch.ones(1)
        del tensors["model.layers.0.mlp.down_proj.weight_scale_inv"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)

    found = problems_of(rewritten(tmp_path / "a", tmp_path / "b", spoil))
    cache = "scales of a cache or of attention are not supported"
    assert sorted(found) == sorted(
        [
            f"{ATTENTION}.q_proj.weight_scale_inv is [3, 2], [2, 2] is needed",
            f"{ATTENTION}.o_proj.weight_scale_inv is F8_E5M2: BF16, F16 or F32 is needed",
            f"{ATTENTION}.k_proj.weight is F32: F8_E4M3 is needed, as quantization_config says",
            f"{ATTENTION}.v_proj.weight is F8_E5M2: F8_E4M3 is needed, as quantization_config says",
            f"{ATTENTION}.k_scale is F32: {cache}",
            f"{ATTENTION}.v_scale is F32: {cache}",
            "model.layers.0.mlp.up_proj.input_scale is F32: static scales of activations are not "
            "supported",
            "missing layers.0.mlp.down_proj.weight_scale [2, 3]",
            "lm_head.weight is F8_E4M3: plain numbers are needed, unless quantization_config says "
            "otherwise",
        ]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ODD_TARGETS)
def test_a_gpu_gets_what_a_cpu_gets(plain, tmp_path, name, form):
    write_fp8(plain[name], tmp_path, form)
    expected = load_target(tmp_path, progress=False).tensors
    found = load_target(tmp_path, device="cuda", progress=False).tensors
    for key, x in expected.items():
        assert torch.equal(found[key].cpu().view(torch.uint8), x.view(torch.uint8)), key
